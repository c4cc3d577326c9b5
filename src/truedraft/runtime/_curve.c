/* What the control computes of a curve of pass costs in every pass; `curve.py` has the same in Python, and says why. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { KNOTS = 256 }; /* of a curve, at most */

/* A curve by its widths and seconds; `mean` and `passes` of its knots. */
typedef struct {
    Py_ssize_t n;
    double width[KNOTS], seconds[KNOTS], mean[KNOTS], passes[KNOTS];
} Curve;

/* Whether `found` holds the `n` numbers of a tuple. */
static int numbers(PyObject *tuple, Py_ssize_t n, double *found) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != n || n < 1 || n > KNOTS) {
        PyErr_SetString(PyExc_ValueError, "a curve needs 1 to 256 widths, and as many seconds");
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) found[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, i));
    return !PyErr_Occurred();
}

static int read_curve(Curve *c, PyObject *widths, PyObject *seconds) {
    c->n = PyTuple_Check(widths) ? PyTuple_GET_SIZE(widths) : 0;
    return numbers(widths, c->n, c->width) && numbers(seconds, c->n, c->seconds);
}

/* The first knot that is as wide as `tokens`, or else the last. */
static Py_ssize_t reaching(const Curve *c, double tokens) {
    Py_ssize_t i = 0;
    while (i < c->n - 1 && c->width[i] < tokens) i++;
    return i;
}

static double at(const Curve *c, double tokens) {
    if (tokens <= c->width[0] || c->n == 1) return c->seconds[0];
    const Py_ssize_t i = reaching(c, tokens);
    const double w0 = c->width[i - 1], s0 = c->seconds[i - 1];
    return s0 + (c->seconds[i] - s0) * ((tokens - w0) / (c->width[i] - w0));
}

/* best_size(widths, seconds, sizes, gains, unit, nodes, tokens, aside). */
static PyObject *best_size(PyObject *self, PyObject *args) {
    Curve c;
    PyObject *widths, *seconds, *sizes, *gains;
    double unit, nodes, tokens, aside;
    if (!PyArg_ParseTuple(args, "OOO!O!dddd", &widths, &seconds, &PyTuple_Type, &sizes, &PyList_Type, &gains, &unit, &nodes,
                          &tokens, &aside))
        return NULL;
    if (!read_curve(&c, widths, seconds)) return NULL;
    Py_ssize_t before = 0, chosen = 0;
    double best = tokens / (at(&c, nodes) + aside), gained = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sizes) && !PyErr_Occurred(); i++) {
        const Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i));
        if (size < before || size >= PyList_GET_SIZE(gains)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "sizes must ascend, and each needs a gain");
            break;
        }
        const double gain = PyFloat_AsDouble(PyList_GET_ITEM(gains, size));
        if (i) nodes += unit * (double)(size - before), tokens += gain - gained;
        const double goodput = tokens / (at(&c, nodes) + aside);
        if (i && goodput > best) best = goodput, chosen = size;
        before = size, gained = gain;
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(chosen);
}

static double within(double x, double least, double most) {
    x = least > x ? least : x;
    return most < x ? most : x;
}

/* Moves a knot's mean to what a pass near it implies, at once if that is faster than expected. */
static void moved(Curve *c, Py_ssize_t i, double near, double implied, double kept, double least, double most, double fastest,
                  double faint) {
    if (!near) return;
    const double passes = c->passes[i] * kept + near, mean = c->mean[i];
    const double share = near / passes, target = within(implied, least, most);
    const double step = target >= mean && fastest < share ? fastest : share;
    c->mean[i] = within(mean + (target - mean) * step, least, most);
    c->passes[i] = faint > passes ? faint : passes;
}

/* The means of the knots made non-decreasing, as `seconds` (pool adjacent violators). */
static void made_isotonic(Curve *c) {
    double mean[KNOTS], weight[KNOTS];
    Py_ssize_t count[KNOTS], pools = 0, at = 0;
    for (Py_ssize_t i = 0; i < c->n; i++, pools++) {
        mean[pools] = c->mean[i], weight[pools] = c->passes[i], count[pools] = 1;
        while (pools && mean[pools - 1] > mean[pools]) {
            const double before = mean[pools - 1], all = weight[pools - 1] + weight[pools], now = mean[pools];
            mean[pools - 1] = within(now + (before - now) * (weight[pools - 1] / all), now, before);
            weight[pools - 1] = all, count[pools - 1] += count[pools], pools--;
        }
    }
    for (Py_ssize_t k = 0; k < pools; k++)
        for (Py_ssize_t i = 0; i < count[k]; i++) c->seconds[at++] = mean[k];
}

/* The knots and the seconds of a curve, as tuples; knots are of the type `knot`, a tuple of width, mean and passes. */
static PyObject *tuples_of(const Curve *c, PyTypeObject *knot, PyObject *widths) {
    PyObject *knots = PyTuple_New(c->n), *seconds = PyTuple_New(c->n), *result = NULL;
    for (Py_ssize_t i = 0; knots && seconds && i < c->n; i++) {
        PyObject *one = knot->tp_alloc(knot, 3);
        if (!one) break;
        PyTuple_SET_ITEM(one, 0, Py_NewRef(PyTuple_GET_ITEM(widths, i)));
        PyTuple_SET_ITEM(one, 1, PyFloat_FromDouble(c->mean[i]));
        PyTuple_SET_ITEM(one, 2, PyFloat_FromDouble(c->passes[i]));
        PyTuple_SET_ITEM(knots, i, one);
        PyTuple_SET_ITEM(seconds, i, PyFloat_FromDouble(c->seconds[i]));
    }
    if (!PyErr_Occurred()) result = PyTuple_Pack(2, knots, seconds);
    Py_XDECREF(knots);
    Py_XDECREF(seconds);
    return result;
}

/* learned(Knot, knots, widths, seconds, tokens, spent, plain, kept, fastest, faint, least, most). */
static PyObject *learned(PyObject *self, PyObject *args) {
    Curve c;
    PyObject *knot, *knots, *widths, *seconds;
    double tokens, spent, plain, kept, fastest, faint, least, most;
    if (!PyArg_ParseTuple(args, "O!O!OOdddddddd", &PyType_Type, &knot, &PyTuple_Type, &knots, &widths, &seconds, &tokens, &spent,
                          &plain, &kept, &fastest, &faint, &least, &most))
        return NULL;
    if (!read_curve(&c, widths, seconds)) return NULL;
    int sound = PyType_IsSubtype((PyTypeObject *)knot, &PyTuple_Type) && PyTuple_GET_SIZE(knots) == c.n;
    const double expected = at(&c, tokens);
    for (Py_ssize_t i = 0; sound && i < c.n; i++) {
        PyObject *one = PyTuple_GET_ITEM(knots, i);
        sound = PyTuple_Check(one) && PyTuple_GET_SIZE(one) == 3;
        if (!sound) break;
        c.mean[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(one, 1)), c.passes[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(one, 2));
    }
    if (!sound && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a curve needs a knot of three numbers for each width");
    if (PyErr_Occurred()) return NULL;
    const Py_ssize_t i = reaching(&c, tokens);
    double near = 1, beside = 0;
    if (i && c.width[i] != tokens && (c.width[i - 1] > plain) == (tokens > plain)) {
        const double upper = (tokens - c.width[i - 1]) / (c.width[i] - c.width[i - 1]);
        near = upper > 1 ? 1 : upper, beside = 1 - near;
    }
    const double assumed = c.mean[i];
    moved(&c, i, near, spent * (c.seconds[i] / expected), kept, least, most, fastest, faint);
    if (beside) moved(&c, i - 1, beside, spent * (c.seconds[i - 1] / expected), kept, least, most, fastest, faint);
    for (Py_ssize_t k = 0; k < c.n; k++) {
        if ((near && k == i) || (beside && k == i - 1)) continue;
        if (k > i && tokens > plain && c.passes[k] <= faint) /* of wider passes, none of which was seen */
            c.mean[k] = within(c.mean[k] * (c.mean[i] / assumed), least, most);
        c.passes[k] = faint > c.passes[k] * kept ? faint : c.passes[k] * kept;
    }
    made_isotonic(&c);
    return tuples_of(&c, (PyTypeObject *)knot, widths);
}

static PyMethodDef methods[] = {
    {"best_size", best_size, METH_VARARGS, "best_size(widths, seconds, sizes, gains, unit, nodes, tokens, aside) -> a size."},
    {"learned", learned, METH_VARARGS, "learned(Knot, knots, widths, seconds, pass...) -> the knots and seconds after a pass."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_curve", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__curve(void) { return PyModule_Create(&module); }
