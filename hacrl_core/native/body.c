/* The body of a small Llama-style model over the nodes of a prefix tree, forward and backward, between its matrix
   products. Heads have their channels in pairs (see body.py). */

#include "common.h"

/* Rows divided by their root mean square, and that factor. */
void norm_forward(const float *x, float *hat, float *inverse, int64_t rows, int64_t width, float epsilon) {
    for (int64_t r = 0; r < rows; r++, x += width, hat += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
        const float scale = 1.0f / sqrtf(sum / width + epsilon);
        for (int64_t i = 0; i < width; i++) hat[i] = x[i] * scale;
        inverse[r] = scale;
    }
}

void norm_backward(
    const float *slope, const float *hat, const float *inverse, float *out, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, slope += width, hat += width, out += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += slope[i] * hat[i];
        const float mean = sum / width, scale = inverse[r];
        for (int64_t i = 0; i < width; i++) out[i] = (slope[i] - hat[i] * mean) * scale;
    }
}

/* silu(gate) * up */
void gate_forward(const float *gate, const float *up, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
}

void gate_backward(const float *slope, const float *gate, const float *up, float *d_gate, float *d_up, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float open = 1.0f / (1.0f + exp_fast(-gate[i]));
        d_up[i] = slope[i] * gate[i] * open;
        d_gate[i] = slope[i] * up[i] * open * (1.0f + gate[i] * (1.0f - open));
    }
}

/* Rows are the paths of responses from the root of the tree. A row answers for the nodes that no row before it has: those
   from ``starts`` on. All its nodes are keys. */
typedef struct {
    int64_t rows, heads, key_heads, channels, longest;
    float scale;
    const float *turns;    /* [depth, channels]: cosine and sine of each pair */
    const int64_t *nodes;  /* [rows, longest] */
    const int64_t *starts; /* [rows] */
    const int64_t *ends;   /* [rows] */
} Paths;

static inline void turn(const float *in, const float *angles, int64_t D, float *out) {
    for (int64_t d = 0; d < D; d += 2) {
        const float a = in[d], b = in[d + 1];
        out[d] = a * angles[d] - b * angles[d + 1];
        out[d + 1] = a * angles[d + 1] + b * angles[d];
    }
}

static inline void add_turned_back(const float *in, const float *angles, int64_t D, float *out) {
    for (int64_t d = 0; d < D; d += 2) {
        const float a = in[d], b = in[d + 1];
        out[d] += a * angles[d] + b * angles[d + 1];
        out[d + 1] += b * angles[d] - a * angles[d + 1];
    }
}

/* A row's keys, turned, and values of one head, side by side in memory. */
static inline void gather(
    const Paths *p, const float *joined, int64_t row, int64_t head, int64_t D, float *keys, float *values) {
    const int64_t wide = (p->heads + 2 * p->key_heads) * D, *nodes = p->nodes + row * p->longest;
    for (int64_t t = 0; t < p->ends[row]; t++) {
        const float *node = joined + nodes[t] * wide;
        turn(node + (p->heads + head) * D, p->turns + t * D, D, keys + t * D);
        memcpy(values + t * D, node + (p->heads + p->key_heads + head) * D, D * sizeof(float));
    }
}

static inline __attribute__((always_inline)) float dot(const float *a, const float *b, const int64_t D) {
    float sum = 0.0f;
    for (int64_t d = 0; d < D; d++) sum += a[d] * b[d];
    return sum;
}

static inline __attribute__((always_inline)) void add_times(float *to, float by, const float *from, const int64_t D) {
    for (int64_t d = 0; d < D; d++) to[d] += by * from[d];
}

static inline __attribute__((always_inline)) void forward_of(
    const Paths *p, const float *joined, float *shares, float *read, float *space, const int64_t D) {
    const int64_t wide = (p->heads + 2 * p->key_heads) * D, each = p->heads / p->key_heads;
    float *keys = space, *values = keys + p->longest * D;
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t *nodes = p->nodes + row * p->longest, end = p->ends[row];
        if (p->starts[row] == end) continue;
        for (int64_t head = 0; head < p->key_heads; head++) {
            gather(p, joined, row, head, D, keys, values);
            for (int64_t g = head * each; g < (head + 1) * each; g++)
                for (int64_t t = p->starts[row]; t < end; shares += ++t) {
                    float query[D], out[D], top = -INFINITY, sum = 0.0f;
                    turn(joined + nodes[t] * wide + g * D, p->turns + t * D, D, query);
                    for (int64_t d = 0; d < D; d++) query[d] *= p->scale, out[d] = 0.0f;
                    for (int64_t s = 0; s <= t; s++) shares[s] = dot(query, keys + s * D, D);
                    for (int64_t s = 0; s <= t; s++) top = shares[s] > top ? shares[s] : top;
                    for (int64_t s = 0; s <= t; s++) shares[s] = exp_fast(shares[s] - top);
                    for (int64_t s = 0; s <= t; s++) sum += shares[s];
                    const float share = 1.0f / sum;
                    for (int64_t s = 0; s <= t; s++) shares[s] *= share;
                    for (int64_t s = 0; s <= t; s++) add_times(out, shares[s], values + s * D, D);
                    memcpy(read + (nodes[t] * p->heads + g) * D, out, D * sizeof(float));
                }
        }
    }
}

static inline __attribute__((always_inline)) void backward_of(
    const Paths *p, const float *joined, const float *shares, const float *slope, float *out, float *space,
    const int64_t D) {
    const int64_t wide = (p->heads + 2 * p->key_heads) * D, each = p->heads / p->key_heads, size = p->longest * D;
    float *keys = space, *values = keys + size, *d_keys = values + size, *d_values = d_keys + size;
    float *d_scores = d_values + size;
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t *nodes = p->nodes + row * p->longest, end = p->ends[row];
        if (p->starts[row] == end) continue;
        for (int64_t head = 0; head < p->key_heads; head++) {
            gather(p, joined, row, head, D, keys, values);
            memset(d_keys, 0, 2 * size * sizeof(float));
            for (int64_t g = head * each; g < (head + 1) * each; g++)
                for (int64_t t = p->starts[row]; t < end; shares += ++t) {
                    const float *heard = slope + (nodes[t] * p->heads + g) * D;
                    float query[D], d_query[D], mean = 0.0f;
                    turn(joined + nodes[t] * wide + g * D, p->turns + t * D, D, query);
                    for (int64_t d = 0; d < D; d++) d_query[d] = 0.0f;
                    for (int64_t s = 0; s <= t; s++) d_scores[s] = dot(heard, values + s * D, D);
                    for (int64_t s = 0; s <= t; s++) mean += d_scores[s] * shares[s];
                    for (int64_t s = 0; s <= t; s++) d_scores[s] = (d_scores[s] - mean) * shares[s] * p->scale;
                    for (int64_t s = 0; s <= t; s++) {
                        add_times(d_query, d_scores[s], keys + s * D, D);
                        add_times(d_keys + s * D, d_scores[s], query, D);
                        add_times(d_values + s * D, shares[s], heard, D);
                    }
                    add_turned_back(d_query, p->turns + t * D, D, out + nodes[t] * wide + g * D);
                }
            for (int64_t t = 0; t < end; t++) {
                float *node = out + nodes[t] * wide;
                add_turned_back(d_keys + t * D, p->turns + t * D, D, node + (p->heads + head) * D);
                add_times(node + (p->heads + p->key_heads + head) * D, 1.0f, d_values + t * D, D);
            }
        }
    }
}

#define CHOOSE(CALL)                                        \
    switch (p->channels) {                                  \
        case 16: CALL(16); break;                           \
        case 24: CALL(24); break;                           \
        case 32: CALL(32); break;                           \
        default: CALL(p->channels);                         \
    }

/* From queries, keys and values of all nodes, [node, heads + 2 key heads, channels], to what each node reads, [node, heads,
   channels]. ``shares`` keeps what each query gives to each key, for the backward pass. */
void attend_forward(const Paths *p, const float *joined, float *shares, float *read, float *space) {
#define FORWARD(D) forward_of(p, joined, shares, read, space, D)
    CHOOSE(FORWARD)
}

/* Adds to ``out``, which has the shape of ``joined``. */
void attend_backward(
    const Paths *p, const float *joined, const float *shares, const float *slope, float *out, float *space) {
#define BACKWARD(D) backward_of(p, joined, shares, slope, out, space, D)
    CHOOSE(BACKWARD)
}
