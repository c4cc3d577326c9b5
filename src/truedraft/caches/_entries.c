/* Entries of cached keys and values. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { FIELDS = 5 }; /* of a tensor: its address, bytes from a slot to the next and from a head to the next, heads, bytes of an entry */

/* Moves a slot's entries of one tensor (slots, heads, positions, size), in which the entries of a head are adjacent. */
static void move_within(const int64_t *tensor, int64_t slot, int64_t first, const int64_t *place, Py_ssize_t count) {
    char *head = (char *)(uintptr_t)tensor[0] + slot * tensor[1];
    const int64_t entry = tensor[4];
    for (int64_t h = 0; h < tensor[3]; h++, head += tensor[2])
        for (Py_ssize_t i = 0; i < count; i++) memmove(head + (first + i) * entry, head + place[i] * entry, (size_t)entry);
}

/* move(tensors, slot, first, places): see entries.py. Ascending places that are not before their new ones leave every
   entry where it is until it has been copied. */
static PyObject *move(PyObject *self, PyObject *args) {
    Py_buffer tensors;
    long long slot, first;
    PyObject *places;
    if (!PyArg_ParseTuple(args, "y*LLO!", &tensors, &slot, &first, &PyList_Type, &places)) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(places), fields = tensors.len / (Py_ssize_t)sizeof(int64_t);
    int64_t *place = PyMem_Malloc((size_t)(count + 1) * sizeof(int64_t));
    if (!place) PyErr_NoMemory();
    for (Py_ssize_t i = 0; place && i < count && !PyErr_Occurred(); i++) {
        place[i] = PyLong_AsLongLong(PyList_GET_ITEM(places, i));
        if (!PyErr_Occurred() && place[i] < (i ? place[i - 1] + 1 : first))
            PyErr_SetString(PyExc_ValueError, "places must ascend from `first` on");
    }
    if (!PyErr_Occurred())
        for (Py_ssize_t i = 0; i + FIELDS <= fields; i += FIELDS)
            move_within((const int64_t *)tensors.buf + i, slot, first, place, count);
    PyMem_Free(place);
    PyBuffer_Release(&tensors);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"move", move, METH_VARARGS, "move(tensors, slot, first, places): moves a slot's entries at `places` to `first` on."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_entries", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__entries(void) { return PyModule_Create(&module); }
