/* Operations on draft trees node by node: merging several (union.py), counting their accepted nodes, and calibrating
   their confidence (drafters/_trust.py). A tree is given as (tokens, parents, confidences, probes). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { TREES = 31 }; /* `owner` has a bit for each */

typedef struct {
    int32_t token, parent, below, next, owner, place; /* below, next: the first child and the next sibling, 0 for none */
    int8_t probe;
    double confidence, weight, value;
} Node;

typedef struct {
    double rank;
    int32_t node;
} Ranked;

static int likelier(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? 1 : -1;
    return x->node - y->node; /* of equally likely nodes the first: parents come before their children */
}

/* Adds a tree given as (tokens, parents, confidences, probes) to the `n` nodes so far, of which there is room for `most`;
   returns their new number, -1 on an error. `at`: room for the index of every node of the tree. */
static int32_t added(Node *node, int32_t n, int32_t most, int32_t *at, PyObject *tree, int32_t k, double weight) {
    PyObject *tokens, *parents, *confidences, *probes;
    if (!PyTuple_Check(tree)) {
        PyErr_SetString(PyExc_TypeError, "a tree is a tuple of tokens, parents, confidences and probes");
        return -1;
    }
    if (!PyArg_ParseTuple(tree, "O!O!O!O", &PyTuple_Type, &tokens, &PyTuple_Type, &parents, &PyTuple_Type, &confidences, &probes))
        return -1;
    Py_ssize_t size = PyTuple_GET_SIZE(tokens);
    int any = PyObject_IsTrue(probes);
    if (PyTuple_GET_SIZE(parents) != size || PyTuple_GET_SIZE(confidences) != size || n + size > most) {
        PyErr_SetString(PyExc_ValueError, "trees need a parent and a confidence for each token");
        return -1;
    }
    at[0] = 0;
    for (Py_ssize_t i = 1; i < size; i++) {
        int32_t token = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(tokens, i));
        long parent = PyLong_AsLong(PyTuple_GET_ITEM(parents, i));
        double confidence = PyFloat_AsDouble(PyTuple_GET_ITEM(confidences, i));
        int probe = 0;
        if (any) {
            PyObject *here = PyLong_FromSsize_t(i);
            probe = here ? PySequence_Contains(probes, here) : -1;
            Py_XDECREF(here);
        }
        if (PyErr_Occurred() || probe < 0) return -1;
        if (confidence != confidence) confidence = 0; /* NaN has no order */
        if (parent < 0 || parent >= i) {
            PyErr_SetString(PyExc_ValueError, "parents must point backwards");
            return -1;
        }
        int32_t up = at[parent], found = 0;
        if (!probe)
            for (found = node[up].below; found && (node[found].probe || node[found].token != token);)
                found = node[found].next;
        if (!found) {
            found = n++;
            node[found] = (Node){token, up, 0, node[up].below, 0, -1, (int8_t)probe, confidence, weight, 0};
            node[up].below = found;
        } else {
            if (confidence > node[found].confidence) node[found].confidence = confidence;
            if (weight > node[found].weight) node[found].weight = weight;
        }
        node[found].owner |= (int32_t)(1u << k);
        at[i] = found;
    }
    return n;
}

/* At most one child of a node is accepted: the confidence of a child is reduced by that of likelier siblings. Trees are
   assumed to err independently; the confidence of siblings of one tree is consistent already. `family`, `before`: room
   for all nodes. */
static void limit_siblings(Node *node, int32_t n, Ranked *family, double *before) {
    for (int32_t up = 0; up < n; up++) {
        int32_t size = 0;
        for (int32_t i = node[up].below; i; i = node[i].next)
            if (!node[i].probe) family[size++] = (Ranked){node[i].confidence, i};
        if (size < 2) continue;
        qsort(family, (size_t)size, sizeof(Ranked), likelier);
        double left = 1;
        for (int32_t k = 0; k < size; k++) {
            Node *one = &node[family[k].node];
            double own = 0;
            for (int32_t j = 0; j < k; j++)
                if (node[family[j].node].owner & one->owner) own += before[j];
            before[k] = one->confidence;
            double share = left > 0 ? one->confidence * left / (1 - own > left ? 1 - own : left) : 0;
            one->confidence = share < left ? share : left;
            left -= one->confidence;
        }
    }
}

static PyObject *union_of(PyObject *self, PyObject *args) {
    PyObject *trees, *weights;
    Py_ssize_t budget;
    if (!PyArg_ParseTuple(args, "O!nO!", &PyList_Type, &trees, &budget, &PyList_Type, &weights)) return NULL;
    Py_ssize_t given = PyList_GET_SIZE(trees);
    if (given < 1 || given > TREES || PyList_GET_SIZE(weights) != given) {
        PyErr_SetString(PyExc_ValueError, "one to 31 trees, and a weight for each");
        return NULL;
    }
    int32_t count = (int32_t)given, n = 1, kept = 0, out = 1;
    Py_ssize_t most = 1;
    for (int32_t k = 0; k < count; k++) {
        PyObject *tree = PyList_GET_ITEM(trees, k);
        if (PyTuple_Check(tree) && PyTuple_GET_SIZE(tree) && PyTuple_Check(PyTuple_GET_ITEM(tree, 0)))
            most += PyTuple_GET_SIZE(PyTuple_GET_ITEM(tree, 0));
    }
    Node *node = most < INT32_MAX ? PyMem_Malloc(most * (sizeof(Node) + sizeof(Ranked) + sizeof(double) + 2 * sizeof(int32_t))) : NULL;
    if (!node) return PyErr_NoMemory();
    Ranked *order = (Ranked *)(node + most);
    double *room = (double *)(order + most);
    int32_t *at = (int32_t *)(room + most), *from = at + most;
    node[0] = (Node){0, -1, 0, 0, (int32_t)((1u << count) - 1), 0, 0, 1, 1, 1};
    for (int32_t k = 0; k < count && n > 0; k++) {
        PyObject *tree = PyList_GET_ITEM(trees, k);
        double weight = PyFloat_AsDouble(PyList_GET_ITEM(weights, k));
        if (weight != weight) weight = 0;
        n = PyErr_Occurred() ? -1 : added(node, n, (int32_t)most, at, tree, k, weight);
    }
    PyObject *result = NULL;
    if (n < 0) goto end;
    limit_siblings(node, n, order, room);
    for (int32_t i = 1; i < n; i++) {
        node[i].value = node[node[i].parent].value * node[i].confidence;
        if (!node[i].probe) order[kept++] = (Ranked){node[i].value * node[i].weight, i};
    }
    qsort(order, (size_t)kept, sizeof(Ranked), likelier);
    from[0] = 0;
    for (int32_t i = 0; i < kept && i < budget; i++) from[out] = order[i].node, node[order[i].node].place = out, out++;
    int32_t drafted = out;
    for (int32_t i = 1; i < n; i++)
        if (node[i].probe && node[node[i].parent].place >= 0) from[out] = i, node[i].place = out, out++;
    PyObject *tokens = PyTuple_New(out), *parents = PyTuple_New(out), *confidences = PyTuple_New(out), *owners = PyList_New(out);
    if (tokens && parents && confidences && owners) {
        PyObject *first = PyTuple_GET_ITEM(PyList_GET_ITEM(trees, 0), 0);
        node[0].token = PyTuple_GET_SIZE(first) ? (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(first, 0)) : 0;
        for (int32_t i = 0; i < out; i++) {
            const Node *one = &node[from[i]];
            PyTuple_SET_ITEM(tokens, i, PyLong_FromLong(one->token));
            PyTuple_SET_ITEM(parents, i, PyLong_FromLong(i ? node[one->parent].place : -1));
            PyTuple_SET_ITEM(confidences, i, PyFloat_FromDouble(one->confidence));
            PyList_SET_ITEM(owners, i, PyLong_FromLong(one->owner));
        }
        if (!PyErr_Occurred()) result = Py_BuildValue("OOOOi", tokens, parents, confidences, owners, drafted);
    }
    Py_XDECREF(tokens);
    Py_XDECREF(parents);
    Py_XDECREF(confidences);
    Py_XDECREF(owners);
end:
    PyMem_Free(node);
    return result;
}

static int is_probe(PyObject *probes, int any, Py_ssize_t node) {
    if (!any) return 0;
    PyObject *here = PyLong_FromSsize_t(node);
    const int found = here ? PySequence_Contains(probes, here) : -1;
    Py_XDECREF(here);
    return found;
}

/* alone(owners, tokens, parents, probes, emitted, verified): see union.py. */
static PyObject *alone(PyObject *self, PyObject *args) {
    PyObject *owners, *tokens, *parents, *probes, *emitted, *result = NULL;
    Py_ssize_t verified, right[TREES] = {0}, made[TREES] = {0}, node = 0, at = 0;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!n", &PyList_Type, &owners, &PyTuple_Type, &tokens, &PyTuple_Type, &parents, &probes,
                          &PyList_Type, &emitted, &verified))
        return NULL;
    const Py_ssize_t n = PyTuple_GET_SIZE(tokens);
    const int any = PyObject_IsTrue(probes);
    int trees = 0;
    if (PyList_GET_SIZE(owners) != n || PyTuple_GET_SIZE(parents) != n || !n) {
        PyErr_SetString(PyExc_ValueError, "nodes need a token, a parent and owners");
        return NULL;
    }
    for (long all = PyLong_AsLong(PyList_GET_ITEM(owners, 0)); all > 0 && trees < TREES; all >>= 1) trees++;
    for (Py_ssize_t i = 1; i < n; i++) { /* children follow their parents */
        const long owner = PyLong_AsLong(PyList_GET_ITEM(owners, i));
        int own = -1;
        if (owner > 0 && !(owner & (owner - 1)))
            for (own = 0; owner >> own > 1; own++) {}
        if (own >= trees) own = -1;
        if (own >= 0 && i <= verified) made[own]++;
        if (at == PyList_GET_SIZE(emitted) || PyLong_AsSsize_t(PyTuple_GET_ITEM(parents, i)) != node) continue;
        if (PyLong_AsLong(PyTuple_GET_ITEM(tokens, i)) != PyLong_AsLong(PyList_GET_ITEM(emitted, at))) continue;
        if (is_probe(probes, any, i)) continue;
        node = i, at++;
        if (own >= 0 && i <= verified) right[own]++;
    }
    PyObject *rights = PyList_New(trees), *mades = PyList_New(trees);
    for (int k = 0; rights && mades && k < trees; k++) {
        PyList_SET_ITEM(rights, k, PyLong_FromSsize_t(right[k]));
        PyList_SET_ITEM(mades, k, PyLong_FromSsize_t(made[k]));
    }
    if (!PyErr_Occurred()) result = PyTuple_Pack(2, rights, mades);
    Py_XDECREF(rights);
    Py_XDECREF(mades);
    return result;
}

static int likelier_row(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? 1 : -1;
    return y->node - x->node;
}

/* ranked(trees): see drafters/_trees.py. A tree is (parents, confidences, probes). */
static PyObject *ranked(PyObject *self, PyObject *args) {
    PyObject *trees, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &trees)) return NULL;
    const Py_ssize_t rows = PyList_GET_SIZE(trees);
    Py_ssize_t all = 0, most = 1, n = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyObject *parents, *confidences, *probes;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(trees, row), "O!O!O", &PyTuple_Type, &parents, &PyTuple_Type, &confidences, &probes))
            return NULL;
        const Py_ssize_t size = PyTuple_GET_SIZE(parents);
        if (PyTuple_GET_SIZE(confidences) != size) {
            PyErr_SetString(PyExc_ValueError, "nodes need a parent and a confidence each");
            return NULL;
        }
        all += size, most = size > most ? size : most;
    }
    Ranked *order = PyMem_Malloc((size_t)(all + 1) * sizeof(Ranked) + (size_t)most * sizeof(double));
    if (!order) return PyErr_NoMemory();
    double *path = (double *)(order + all + 1);
    for (Py_ssize_t row = 0; row < rows && !PyErr_Occurred(); row++) {
        PyObject *parents, *confidences, *probes;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(trees, row), "OOO", &parents, &confidences, &probes)) break;
        const int any = PyObject_IsTrue(probes);
        double least = path[0] = 1;
        for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(parents); i++) {
            const Py_ssize_t up = PyLong_AsSsize_t(PyTuple_GET_ITEM(parents, i));
            if (up < 0 || up >= i) {
                if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "parents must point backwards");
                break;
            }
            path[i] = is_probe(probes, any, i) ? 0 : path[up] * PyFloat_AsDouble(PyTuple_GET_ITEM(confidences, i));
            if (path[i] < least) least = path[i];
            order[n++] = (Ranked){least, (int32_t)row};
        }
    }
    if (!PyErr_Occurred()) {
        qsort(order, (size_t)n, sizeof(Ranked), likelier_row);
        PyObject *gains = PyList_New(n + 1), *of = PyList_New(n);
        double sum = 0;
        for (Py_ssize_t i = 0; gains && of && i <= n; i++) {
            PyList_SET_ITEM(gains, i, PyFloat_FromDouble(sum));
            if (i < n) PyList_SET_ITEM(of, i, PyLong_FromLong(order[i].node)), sum += order[i].rank;
        }
        if (!PyErr_Occurred()) result = PyTuple_Pack(2, gains, of);
        Py_XDECREF(gains);
        Py_XDECREF(of);
    }
    PyMem_Free(order);
    return result;
}

/* Counts by bin of the confidence, of all rows and of one: nodes verified, and nodes accepted. */
typedef struct {
    Py_buffer edges, right, tried, mine_right, mine_tried;
} Tallies;

static int bins(const Tallies *t) { return (int)(t->edges.len / sizeof(double)) + 1; }

static int sound(const Tallies *t) {
    Py_ssize_t size = bins(t) * (Py_ssize_t)sizeof(double);
    if (t->right.len == size && t->tried.len == size && t->mine_right.len == size && t->mine_tried.len == size) return 1;
    PyErr_SetString(PyExc_ValueError, "tallies need one bin more than there are edges");
    return 0;
}

static void released(Tallies *t) {
    PyBuffer_Release(&t->edges);
    PyBuffer_Release(&t->right);
    PyBuffer_Release(&t->tried);
    PyBuffer_Release(&t->mine_right);
    PyBuffer_Release(&t->mine_tried);
}

static int bin_of(const Tallies *t, double confidence) {
    const double *edge = t->edges.buf;
    int low = 0, high = bins(t) - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (confidence < edge[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

static void seen(Py_buffer *right, Py_buffer *tried, int at, int was_right, double keeps) {
    double *r = right->buf, *n = tried->buf;
    r[at] = r[at] * keeps + was_right;
    n[at] = n[at] * keeps + 1;
}

/* follow(tree, node, emitted, edges, right, tried, mine_right, mine_tried, long, short): the node reached from `node`
   along the emitted tokens, -1 where the tree has no such path or ends; the nodes verified on the way are counted. */
static PyObject *follow(PyObject *self, PyObject *args) {
    PyObject *tokens, *parents, *confidences, *probes, *emitted;
    Tallies t;
    int node;
    double all, one;
    if (!PyArg_ParseTuple(args, "(O!O!O!O)iO!y*w*w*w*w*dd", &PyTuple_Type, &tokens, &PyTuple_Type, &parents,
                          &PyTuple_Type, &confidences, &probes, &node, &PyList_Type, &emitted, &t.edges, &t.right, &t.tried,
                          &t.mine_right, &t.mine_tried, &all, &one))
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(tokens);
    int any = PyObject_IsTrue(probes), ok = sound(&t) && PyTuple_GET_SIZE(parents) == n && PyTuple_GET_SIZE(confidences) == n;
    for (Py_ssize_t k = 0; ok && node >= 0 && k < PyList_GET_SIZE(emitted); k++) {
        long token = PyLong_AsLong(PyList_GET_ITEM(emitted, k));
        int reached = -1;
        for (Py_ssize_t i = node + 1; i < n; i++) {
            if (PyLong_AsLong(PyTuple_GET_ITEM(parents, i)) != node) continue;
            if (any) {
                PyObject *here = PyLong_FromSsize_t(i);
                int probe = here ? PySequence_Contains(probes, here) : -1;
                Py_XDECREF(here);
                if (probe) continue;
            }
            int right = reached < 0 && PyLong_AsLong(PyTuple_GET_ITEM(tokens, i)) == token;
            int at = bin_of(&t, PyFloat_AsDouble(PyTuple_GET_ITEM(confidences, i)));
            seen(&t.right, &t.tried, at, right, all);
            seen(&t.mine_right, &t.mine_tried, at, right, one);
            if (right) reached = (int)i;
        }
        node = reached;
    }
    released(&t);
    if (!ok && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "trees need a parent and a confidence for each token");
    if (PyErr_Occurred()) return NULL;
    int more = 0;
    for (Py_ssize_t i = node + 1; node >= 0 && i < n && !more; i++)
        more = PyLong_AsLong(PyTuple_GET_ITEM(parents, i)) == node;
    return PyLong_FromLong(more ? node : -1);
}

/* settled(confidences, edges, right, tried, mine_right, mine_tried, prior, others): the calibrated confidences, 1 for
   the root. */
static PyObject *settled(PyObject *self, PyObject *args) {
    PyObject *confidences;
    Tallies t;
    double prior, others;
    if (!PyArg_ParseTuple(args, "O!y*y*y*y*y*dd", &PyTuple_Type, &confidences, &t.edges, &t.right, &t.tried, &t.mine_right,
                          &t.mine_tried, &prior, &others))
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(confidences);
    PyObject *found = sound(&t) ? PyTuple_New(n) : NULL;
    const double *right = t.right.buf, *tried = t.tried.buf, *mine_right = t.mine_right.buf, *mine_tried = t.mine_tried.buf;
    for (Py_ssize_t i = 0; found && i < n; i++) {
        double raw = PyFloat_AsDouble(PyTuple_GET_ITEM(confidences, i));
        int at = bin_of(&t, raw);
        double here = (right[at] + prior * raw) / (tried[at] + prior);
        double confidence = i ? (mine_right[at] + others * here) / (mine_tried[at] + others) : 1.0;
        PyObject *made = PyFloat_FromDouble(confidence);
        if (!made || PyErr_Occurred()) {
            Py_XDECREF(made);
            Py_CLEAR(found);
        } else {
            PyTuple_SET_ITEM(found, i, made);
        }
    }
    released(&t);
    return found;
}

/* grown(table, count, root, budget, parents, ranks, confidences): a tree from a template and a table of successors; see
   successors.py. The template's arrays are of int32, int32 and double, of one length. */
static PyObject *grown(PyObject *self, PyObject *args) {
    Py_buffer table, parents, ranks, confidences;
    int count, root;
    Py_ssize_t budget;
    if (!PyArg_ParseTuple(args, "y*iiny*y*y*", &table, &count, &root, &budget, &parents, &ranks, &confidences)) return NULL;
    Py_ssize_t nodes = ranks.len / (Py_ssize_t)sizeof(int32_t), n = 1;
    const int32_t *line = table.buf, *parent = parents.buf, *rank = ranks.buf;
    int64_t known = count > 0 ? table.len / (int64_t)sizeof(int32_t) / count : 0;
    int32_t *room = nodes < INT32_MAX ? PyMem_Malloc((size_t)(4 * nodes + 4) * sizeof(int32_t)) : NULL;
    int32_t *token = room, *above = token + nodes + 1, *from = above + nodes + 1, *place = from + nodes + 1;
    PyObject *result = NULL;
    int sound = parents.len == ranks.len && confidences.len == nodes * (Py_ssize_t)sizeof(double);
    for (Py_ssize_t i = 0; i < nodes && sound; i++) sound = 0 <= parent[i] && parent[i] <= i && 0 <= rank[i];
    if (!sound) PyErr_SetString(PyExc_ValueError, "a template needs parents that point backwards, ranks and confidences");
    if (!room) PyErr_NoMemory();
    if (sound && room) {
        token[0] = root, above[0] = -1, place[0] = 0;
        for (Py_ssize_t i = 0; i < nodes && n <= budget; i++) {
            int32_t below = place[parent[i]], next = 0;
            if (below >= 0 && token[below] >= 0 && token[below] < known && rank[i] < count)
                next = line[(int64_t)token[below] * count + rank[i]];
            place[i + 1] = -1;
            if (next) token[n] = next - 1, above[n] = below, from[n] = (int32_t)i, place[i + 1] = (int32_t)n, n++;
        }
        PyObject *tokens = PyTuple_New(n), *ups = PyTuple_New(n), *chances = PyTuple_New(n);
        for (Py_ssize_t i = 0; i < n && tokens && ups && chances; i++) {
            PyTuple_SET_ITEM(tokens, i, PyLong_FromLong(token[i]));
            PyTuple_SET_ITEM(ups, i, PyLong_FromLong(above[i]));
            PyTuple_SET_ITEM(chances, i, PyFloat_FromDouble(i ? ((const double *)confidences.buf)[from[i]] : 1.0));
        }
        if (!PyErr_Occurred()) result = PyTuple_Pack(3, tokens, ups, chances);
        Py_XDECREF(tokens);
        Py_XDECREF(ups);
        Py_XDECREF(chances);
    }
    PyMem_Free(room);
    PyBuffer_Release(&table);
    PyBuffer_Release(&parents);
    PyBuffer_Release(&ranks);
    PyBuffer_Release(&confidences);
    return result;
}

/* counted(root, count, tokens, parents, counts, sure): a tree of the continuations of `count` occurrences, with
   confidences; see drafters/_trees.py. */
static PyObject *counted(PyObject *self, PyObject *args) {
    PyObject *root, *tokens, *parents, *counts, *sure;
    double count;
    if (!PyArg_ParseTuple(args, "OdO!O!O!O!", &root, &count, &PyList_Type, &tokens, &PyList_Type, &parents, &PyList_Type,
                          &counts, &PyList_Type, &sure))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(tokens), deepest = PyList_GET_SIZE(sure) - 1;
    if (PyList_GET_SIZE(parents) != n || PyList_GET_SIZE(counts) != n || deepest < 0) {
        PyErr_SetString(PyExc_ValueError, "nodes need a parent and a count each, and levels a confidence factor");
        return NULL;
    }
    double *times = PyMem_Malloc((size_t)(n + 1) * (sizeof(double) + sizeof(Py_ssize_t)));
    if (!times) return PyErr_NoMemory();
    Py_ssize_t *level = (Py_ssize_t *)(times + n + 1);
    PyObject *all = PyTuple_New(n + 1), *ups = PyTuple_New(n + 1), *confidences = PyTuple_New(n + 1), *result = NULL;
    if (all && ups && confidences) {
        times[0] = count, level[0] = 0;
        PyTuple_SET_ITEM(all, 0, Py_NewRef(root));
        PyTuple_SET_ITEM(ups, 0, PyLong_FromLong(-1));
        PyTuple_SET_ITEM(confidences, 0, PyFloat_FromDouble(1.0));
        for (Py_ssize_t i = 0; i < n; i++) {
            Py_ssize_t up = PyLong_AsSsize_t(PyList_GET_ITEM(parents, i)) + 1;
            if (up < 0 || up > i) {
                PyErr_SetString(PyExc_ValueError, "parents must point backwards");
                break;
            }
            double of = times[up], here = PyFloat_AsDouble(PyList_GET_ITEM(counts, i));
            double keeps = PyFloat_AsDouble(PyList_GET_ITEM(sure, level[up] < deepest ? level[up] : deepest));
            times[i + 1] = here, level[i + 1] = level[up] + 1;
            PyTuple_SET_ITEM(all, i + 1, Py_NewRef(PyList_GET_ITEM(tokens, i)));
            PyTuple_SET_ITEM(ups, i + 1, PyLong_FromSsize_t(up));
            PyTuple_SET_ITEM(confidences, i + 1, PyFloat_FromDouble(here >= of ? keeps : here / of * keeps));
        }
        if (!PyErr_Occurred()) result = PyTuple_Pack(3, all, ups, confidences);
    }
    PyMem_Free(times);
    Py_XDECREF(all);
    Py_XDECREF(ups);
    Py_XDECREF(confidences);
    return result;
}

/* A pass whose lines of scores are ranked when they are read, by `rank` (truedraft_rank of likeliest.c). */
typedef void Rank(const float *, int64_t, int64_t, const int32_t *, int64_t, int32_t, int32_t *, float *, int8_t *);

typedef struct {
    Rank *rank;
    const float *score;
    long long width, stride;
    int count;
    Py_buffer token, value, state;
} Lines;

enum { ODD = 2 }; /* as in likeliest.c: a line with NaN */

/* The likeliest token of a line: -1 where there are NaN, 0 where none is possible. */
static long likeliest_of(Lines *l, int32_t line) {
    int8_t *state = l->state.buf;
    int32_t *token = l->token.buf;
    if (!state[line]) l->rank(l->score, l->width, l->stride, &line, 1, l->count, token, l->value.buf, state);
    if (state[line] == ODD) return -1;
    return token[(int64_t)line * l->count] < 0 ? 0 : token[(int64_t)line * l->count];
}

/* The path of a tree along the likeliest tokens, probes left out, and the token after it, as (path, token). `node`: room for
   its nodes. first: the line of its root. */
static PyObject *agreed(Lines *l, int32_t first, PyObject *tree, int32_t *node) {
    PyObject *tokens, *parents, *probes;
    if (!PyArg_ParseTuple(tree, "O!O!O", &PyTuple_Type, &tokens, &PyTuple_Type, &parents, &probes)) return NULL;
    const Py_ssize_t n = PyTuple_GET_SIZE(tokens);
    const int any = PyObject_IsTrue(probes);
    Py_ssize_t length = 1;
    node[0] = 0;
    long token = likeliest_of(l, first);
    for (Py_ssize_t i = 1; i < n; i++) { /* children follow their parents */
        if (PyLong_AsLong(PyTuple_GET_ITEM(parents, i)) != node[length - 1]) continue;
        if (PyLong_AsLong(PyTuple_GET_ITEM(tokens, i)) != token) continue;
        if (any) {
            PyObject *here = PyLong_FromSsize_t(i);
            int probe = here ? PySequence_Contains(probes, here) : -1;
            Py_XDECREF(here);
            if (probe < 0) return NULL;
            if (probe) continue;
        }
        node[length++] = (int32_t)i;
        token = likeliest_of(l, first + (int32_t)i);
    }
    PyObject *path = PyTuple_New(length);
    for (Py_ssize_t i = 0; path && i < length; i++) PyTuple_SET_ITEM(path, i, PyLong_FromLong(node[i]));
    return path ? Py_BuildValue("Nl", path, token) : NULL;
}

static int lines_of(PyObject *given, Lines *l) {
    unsigned long long rank, score;
    if (!PyArg_ParseTuple(given, "KKLLiw*w*w*", &rank, &score, &l->width, &l->stride, &l->count, &l->token, &l->value, &l->state))
        return 0;
    l->rank = (Rank *)(uintptr_t)rank, l->score = (const float *)(uintptr_t)score;
    if (l->count > 0 && l->token.len == l->state.len * l->count * (Py_ssize_t)sizeof(int32_t) && l->value.len == l->token.len) return 1;
    PyErr_SetString(PyExc_ValueError, "lines of scores need as many places for what is found of them");
    return 0;
}

static void let_go(Lines *l) {
    PyBuffer_Release(&l->token);
    PyBuffer_Release(&l->value);
    PyBuffer_Release(&l->state);
}

/* Whether there is a tree (tokens, parents, probes) for each of `firsts`, with a line for each node from there on. most: the nodes
   of the largest. */
static int follow_firsts(const Lines *l, PyObject *firsts, PyObject *trees, Py_ssize_t *most) {
    int sound = PyList_GET_SIZE(firsts) == PyList_GET_SIZE(trees);
    *most = 1;
    for (Py_ssize_t i = 0; sound && i < PyList_GET_SIZE(trees); i++) {
        PyObject *tree = PyList_GET_ITEM(trees, i);
        sound = PyTuple_Check(tree) && PyTuple_GET_SIZE(tree) == 3 && PyTuple_Check(PyTuple_GET_ITEM(tree, 0)) &&
                PyTuple_Check(PyTuple_GET_ITEM(tree, 1));
        if (!sound) break;
        const Py_ssize_t n = PyTuple_GET_SIZE(PyTuple_GET_ITEM(tree, 0));
        const long long first = PyLong_AsLongLong(PyList_GET_ITEM(firsts, i));
        sound = n > 0 && PyTuple_GET_SIZE(PyTuple_GET_ITEM(tree, 1)) == n && first >= 0 && first + n <= l->state.len;
        if (n > *most) *most = n;
    }
    if (!sound && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "trees need a parent for each token, and lines of scores");
    return sound;
}

/* walk(lines, firsts, trees): for each tree, whose root's line is in `firsts`, the path along the likeliest tokens and the token
   after it; see ranks.py. */
static PyObject *walk(PyObject *self, PyObject *args) {
    Lines l = {0};
    PyObject *given, *firsts, *trees, *found = NULL;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &given, &PyList_Type, &firsts, &PyList_Type, &trees)) return NULL;
    if (!lines_of(given, &l) || !follow_firsts(&l, firsts, trees, &most)) {
        let_go(&l);
        return NULL;
    }
    int32_t *node = PyMem_Malloc((size_t)most * sizeof(int32_t));
    if (!node) PyErr_NoMemory();
    else found = PyList_New(PyList_GET_SIZE(trees));
    for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(trees); i++) {
        const int32_t first = (int32_t)PyLong_AsLong(PyList_GET_ITEM(firsts, i));
        PyObject *verdict = agreed(&l, first, PyList_GET_ITEM(trees, i), node);
        if (!verdict || PyErr_Occurred()) {
            Py_XDECREF(verdict);
            Py_CLEAR(found);
        } else
            PyList_SET_ITEM(found, i, verdict);
    }
    PyMem_Free(node);
    let_go(&l);
    return found;
}

/* recycle(lines, firsts, tokens, table, count): keeps the `count` likeliest successors of each node's token in the token's line
   of a table, one more than each, 0 where there are fewer; a node without a possible successor changes nothing. tokens: a
   tuple for each row. */
static PyObject *recycle(PyObject *self, PyObject *args) {
    Lines l = {0};
    Py_buffer table = {0};
    PyObject *given, *firsts, *trees;
    int count;
    if (!PyArg_ParseTuple(args, "O!O!O!w*i", &PyTuple_Type, &given, &PyList_Type, &firsts, &PyList_Type, &trees, &table, &count))
        return NULL;
    int sound = lines_of(given, &l) && PyList_GET_SIZE(firsts) == PyList_GET_SIZE(trees) && 0 < count && count <= l.count;
    const int64_t known = sound ? table.len / (int64_t)sizeof(int32_t) / count : 0;
    for (Py_ssize_t i = 0; sound && i < PyList_GET_SIZE(trees); i++) {
        PyObject *tokens = PyList_GET_ITEM(trees, i);
        const long long first = PyLong_AsLongLong(PyList_GET_ITEM(firsts, i));
        sound = PyTuple_Check(tokens) && first >= 0 && first + PyTuple_GET_SIZE(tokens) <= l.state.len;
        for (Py_ssize_t node = 0; sound && node < PyTuple_GET_SIZE(tokens); node++) {
            const long token = PyLong_AsLong(PyTuple_GET_ITEM(tokens, node));
            const int32_t line = (int32_t)(first + node);
            if (token < 0 || token >= known) continue;
            likeliest_of(&l, line);
            const int32_t *best = (const int32_t *)l.token.buf + (int64_t)line * l.count;
            int32_t *kept = (int32_t *)table.buf + (int64_t)token * count;
            for (int k = 0; best[0] >= 0 && k < count; k++) kept[k] = best[k] + 1;
        }
    }
    if (!sound && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "rows need tokens, lines of scores and a table");
    let_go(&l);
    if (table.buf) PyBuffer_Release(&table);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* highest(lines, firsts, paths): the two largest scores at each node of the rows' paths, as bytes of floats. */
static PyObject *highest(PyObject *self, PyObject *args) {
    Lines l = {0};
    PyObject *given, *firsts, *paths, *found = NULL;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &given, &PyList_Type, &firsts, &PyList_Type, &paths)) return NULL;
    Py_ssize_t nodes = 0, at = 0;
    int sound = lines_of(given, &l) && PyList_GET_SIZE(firsts) == PyList_GET_SIZE(paths) && l.count > 1;
    for (Py_ssize_t i = 0; sound && i < PyList_GET_SIZE(paths); i++) {
        sound = PyTuple_Check(PyList_GET_ITEM(paths, i));
        if (sound) nodes += PyTuple_GET_SIZE(PyList_GET_ITEM(paths, i));
    }
    if (sound) found = PyBytes_FromStringAndSize(NULL, nodes * 2 * (Py_ssize_t)sizeof(float));
    float *out = found ? (float *)PyBytes_AS_STRING(found) : NULL;
    for (Py_ssize_t i = 0; found && sound && i < PyList_GET_SIZE(paths); i++) {
        PyObject *path = PyList_GET_ITEM(paths, i);
        const long long first = PyLong_AsLongLong(PyList_GET_ITEM(firsts, i));
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(path); k++, at += 2) {
            const long long line = first + PyLong_AsLongLong(PyTuple_GET_ITEM(path, k));
            sound = sound && line >= 0 && line < l.state.len && !PyErr_Occurred();
            if (!sound) break;
            likeliest_of(&l, (int32_t)line);
            memcpy(out + at, (const float *)l.value.buf + line * l.count, 2 * sizeof(float));
        }
    }
    if (!sound && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "rows need paths within their lines of scores");
    let_go(&l);
    if (PyErr_Occurred()) Py_CLEAR(found);
    return found;
}

static PyMethodDef methods[] = {
    {"alone", alone, METH_VARARGS, "alone(owners, tokens, parents, probes, emitted, verified) -> right, made."},
    {"ranked", ranked, METH_VARARGS, "ranked(trees) -> gains by size, the row of each node."},
    {"walk", walk, METH_VARARGS, "walk(lines, firsts, trees) -> paths and the tokens after them."},
    {"recycle", recycle, METH_VARARGS, "recycle(lines, firsts, tokens, table, count): keeps the likeliest successors."},
    {"highest", highest, METH_VARARGS, "highest(lines, firsts, paths) -> the two largest scores at each node."},
    {"counted", counted, METH_VARARGS, "counted(root, count, tokens, parents, counts, sure) -> tokens, parents, confidences."},
    {"grown", grown, METH_VARARGS, "grown(table, count, root, budget, template...) -> tokens, parents, confidences."},
    {"union", union_of, METH_VARARGS,
     "union(trees, budget, weights) -> tokens, parents, confidences, owners, and the first probe's place."},
    {"follow", follow, METH_VARARGS, "follow(tree, node, emitted, tallies...) -> the node reached, or -1."},
    {"settled", settled, METH_VARARGS, "settled(confidences, tallies..., prior, others) -> the calibrated confidences."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_trees", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__trees(void) { return PyModule_Create(&module); }
