/* Drafts of the continuations that a text has had, from suffix automata (automaton.c). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST = 256 }; /* nodes of a tree, as in automaton.c */

typedef struct {
    int32_t state, length, pending, has_pending; /* as in automaton.c */
} Cursor;

/* truedraft_best of automaton.c. */
typedef int64_t BestTree(const void *, Cursor *, int64_t, double, double, double, int32_t, int32_t, double *, int32_t *, int32_t *,
                     int32_t *, int32_t *);

/* The tree with the most expected tokens so far: that of `times` occurrences of a match of `length` tokens. */
typedef struct {
    double expected;
    int64_t n;
    int32_t times, length, token[MOST], parent[MOST], count[MOST];
} Found;

/* The tree as tuples below `root`. sure: of `lengths` lengths of a match, the confidence that the text continues as it did
   there. */
static PyObject *tuples_of(const Found *f, PyObject *root, const double *sure, Py_ssize_t lengths) {
    PyObject *tokens = PyTuple_New(f->n + 1), *parents = PyTuple_New(f->n + 1), *confidences = PyTuple_New(f->n + 1), *result = NULL;
    if (tokens && parents && confidences) {
        Py_ssize_t level[MOST + 1] = {0};
        const Py_ssize_t from = f->length < lengths - MOST - 1 ? f->length : lengths - MOST - 1;
        PyTuple_SET_ITEM(tokens, 0, Py_NewRef(root));
        PyTuple_SET_ITEM(parents, 0, PyLong_FromLong(-1));
        PyTuple_SET_ITEM(confidences, 0, PyFloat_FromDouble(1.0));
        for (int64_t i = 0; i < f->n; i++) {
            const int32_t up = f->parent[i];
            const double of = up < 0 ? f->times : f->count[up], here = f->count[i], keeps = sure[from + level[up + 1]];
            level[i + 1] = level[up + 1] + 1;
            PyTuple_SET_ITEM(tokens, i + 1, PyLong_FromLong(f->token[i]));
            PyTuple_SET_ITEM(parents, i + 1, PyLong_FromLong(up + 1));
            PyTuple_SET_ITEM(confidences, i + 1, PyFloat_FromDouble(here >= of ? keeps : here / of * keeps));
        }
        if (!PyErr_Occurred()) result = PyTuple_Pack(3, tokens, parents, confidences);
    }
    Py_XDECREF(tokens);
    Py_XDECREF(parents);
    Py_XDECREF(confidences);
    return result;
}

/* frequent(best, sources, longest, root, nodes, alpha, offset, rare, wide, deep, sure): see drafters/_trees.py. best: the address
   of truedraft_best. sources: the addresses of an automaton and a cursor each. */
static PyObject *frequent(PyObject *self, PyObject *args) {
    unsigned long long best;
    PyObject *sources, *root;
    int longest, wide, deep;
    long long nodes;
    double alpha, offset, rare;
    Py_buffer sure;
    if (!PyArg_ParseTuple(args, "KO!iOLdddiiy*", &best, &PyList_Type, &sources, &longest, &root, &nodes, &alpha, &offset, &rare,
                          &wide, &deep, &sure))
        return NULL;
    const Py_ssize_t lengths = sure.len / (Py_ssize_t)sizeof(double);
    Found tries[2] = {{.n = -1}, {.n = -1}};
    int at = 0; /* of the two, the better one so far */
    nodes = nodes < 0 ? 0 : nodes < MOST ? nodes : MOST;
    if (lengths <= MOST) PyErr_SetString(PyExc_ValueError, "every length of a match needs a confidence");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sources) && !PyErr_Occurred(); i++) {
        unsigned long long automaton, place;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(sources, i), "KK", &automaton, &place)) break;
        Cursor here = *(const Cursor *)(uintptr_t)place;
        Found *next = &tries[!at];
        if (longest < here.length) here.length = longest;
        next->expected = tries[at].expected;
        next->n = ((BestTree *)(uintptr_t)best)((const void *)(uintptr_t)automaton, &here, nodes, alpha, offset, rare, wide, deep,
                                                &next->expected, &next->times, next->token, next->parent, next->count);
        next->length = here.length;
        if (next->n >= 0) at = !at;
    }
    PyObject *found = NULL;
    if (!PyErr_Occurred())
        found = tries[at].n < 0 ? Py_NewRef(Py_None) : tuples_of(&tries[at], root, (const double *)sure.buf, lengths);
    PyBuffer_Release(&sure);
    return found;
}

static PyMethodDef methods[] = {
    {"frequent", frequent, METH_VARARGS, "frequent(best, sources, longest, root, sizes..., sure) -> tokens, parents, confidences."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_drafts", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__drafts(void) { return PyModule_Create(&module); }
