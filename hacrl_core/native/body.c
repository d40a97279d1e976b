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

/* Attention is a handful of small matrix products per row and head. They are computed in blocks of four rows and two
   vectors of columns, which stay in registers; so matrices have room for whole blocks. */
enum { LANES = 8, BLOCK = 4, QUERIES = 32 };
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define WHOLE(number, of) (((number) + (of) - 1) / (of) * (of))

/* out [BLOCK, columns], set or added to: a [BLOCK, depth] times b [depth, columns]. ``a`` may lie turned in memory. */
INLINE void block_times(
    float *out, int64_t out_row, const float *a, int64_t a_row, int64_t a_step, int64_t depth, const float *b,
    int64_t b_row, int64_t columns, const int add) {
    int64_t c = 0;
    for (; c + 2 * LANES <= columns; c += 2 * LANES) {
        Vector left[BLOCK], right[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            left[i] = add ? *(Vector *)(out + i * out_row + c) : (Vector){0};
            right[i] = add ? *(Vector *)(out + i * out_row + c + LANES) : (Vector){0};
        }
        for (int64_t k = 0; k < depth; k++) {
            const Vector first = *(const Vector *)(b + k * b_row + c);
            const Vector second = *(const Vector *)(b + k * b_row + c + LANES);
            for (int i = 0; i < BLOCK; i++) {
                const float by = a[i * a_row + k * a_step];
                left[i] += by * first;
                right[i] += by * second;
            }
        }
        for (int i = 0; i < BLOCK; i++) {
            *(Vector *)(out + i * out_row + c) = left[i];
            *(Vector *)(out + i * out_row + c + LANES) = right[i];
        }
    }
    if (c == columns) return;
    Vector sum[BLOCK];
    for (int i = 0; i < BLOCK; i++) sum[i] = add ? *(Vector *)(out + i * out_row + c) : (Vector){0};
    for (int64_t k = 0; k < depth; k++)
        for (int i = 0; i < BLOCK; i++)
            sum[i] += a[i * a_row + k * a_step] * *(const Vector *)(b + k * b_row + c);
    for (int i = 0; i < BLOCK; i++) *(Vector *)(out + i * out_row + c) = sum[i];
}

INLINE void turn(const float *in, const float *angles, float by, int64_t D, float *out) {
    for (int64_t d = 0; d < D; d += 2) {
        const float a = in[d] * by, b = in[d + 1] * by;
        out[d] = a * angles[d] - b * angles[d + 1];
        out[d + 1] = a * angles[d + 1] + b * angles[d];
    }
}

INLINE void turn_back(const float *in, const float *angles, int64_t D, float *out, const int add) {
    for (int64_t d = 0; d < D; d += 2) {
        const float a = in[d], b = in[d + 1];
        out[d] = (add ? out[d] : 0.0f) + a * angles[d] + b * angles[d + 1];
        out[d + 1] = (add ? out[d + 1] : 0.0f) + b * angles[d] - a * angles[d + 1];
    }
}

/* One position of a matrix [channel, position]. */
INLINE void set_column(float *matrix, int64_t row, const float *from, int64_t D) {
    for (int64_t d = 0; d < D; d++) matrix[d * row] = from[d];
}

/* Ask for memory that the next row needs, in the rhythm of this one: nodes lie too far apart for the CPU to foresee. */
INLINE void ask(const float *from, int64_t D) {
    for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(from + d, 0, 2);
}

INLINE void ask_to_write(float *from, int64_t D) {
    for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(from + d, 1, 2);
}

/* How many nodes from the root on a row has in common with the one before it, whose keys are still at hand. */
INLINE int64_t common(const Paths *p, int64_t before, int64_t row) {
    const int64_t *mine = p->nodes + row * p->longest, *other = p->nodes + before * p->longest;
    int64_t t = 0;
    while (before >= 0 && t < p->ends[row] && t < p->ends[before] && mine[t] == other[t]) t++;
    return t;
}

/* Of a row's queries, QUERIES at a time are answered. What they give to their keys is kept as a matrix of whole blocks. */
INLINE int64_t queries_from(const Paths *p, int64_t row, int64_t t0) {
    return p->ends[row] - t0 < QUERIES ? p->ends[row] - t0 : QUERIES;
}

int64_t attend_shares(const Paths *p) {
    int64_t numbers = 0;
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t t0 = p->starts[row]; t0 < p->ends[row]; t0 += QUERIES) {
            const int64_t count = queries_from(p, row, t0);
            numbers += WHOLE(count, BLOCK) * WHOLE(t0 + count, LANES);
        }
    return p->heads * numbers;
}

/* How many numbers both passes need beside their inputs and outputs. */
int64_t attend_space(const Paths *p) {
    const int64_t wide = WHOLE(p->longest, LANES), deep = WHOLE(p->channels, LANES);
    return (2 * p->key_heads + 2) * wide * deep + QUERIES * (wide + 3 * deep);
}

INLINE float sum_of(Vector x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE Vector chosen(Mask first, Vector a, Vector b) { return (Vector)(((Mask)a & first) | ((Mask)b & ~first)); }

/* Softmax of a block of rows, of which the first has t + 1 scores and each further one more; behind them come zeros. */
INLINE void soften(float *scores, int64_t t, int64_t columns, int64_t width) {
    const Vector none = (Vector){0} - INFINITY;
    Mask index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int row = 0; row < BLOCK; row++) {
        float *own = scores + row * width;
        Vector tops = none;
        for (int64_t c = 0; c < columns; c += LANES) {
            const Vector x = chosen(index <= (int32_t)(t + row - c), *(Vector *)(own + c), none);
            tops = chosen(tops > x, tops, x);
            *(Vector *)(own + c) = x;
        }
        float top = tops[0];
        for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
        for (int64_t c = 0; c < columns; c += LANES) *(Vector *)(own + c) -= top;
        for (int64_t c = columns; c < width; c += LANES) *(Vector *)(own + c) = none;
    }
    for (int64_t s = 0; s < BLOCK * width; s++) scores[s] = exp_fast(scores[s]);
    for (int row = 0; row < BLOCK; row++) {
        float *own = scores + row * width;
        Vector sums = {0};
        for (int64_t c = 0; c < columns; c += LANES) sums += *(Vector *)(own + c);
        const float share = 1.0f / sum_of(sums);
        for (int64_t c = 0; c < columns; c += LANES) *(Vector *)(own + c) *= share;
    }
}

INLINE void forward_of(
    const Paths *p, const float *joined, float *shares, float *read, float *space, const int64_t D) {
    const int64_t joined_row = (p->heads + 2 * p->key_heads) * D, each = p->heads / p->key_heads;
    const int64_t wide = WHOLE(p->longest, LANES), deep = WHOLE(D, LANES);
    float *queries = space + 2 * p->key_heads * wide * deep, *out = queries + QUERIES * deep;
    for (int64_t row = 0, before = -1; row < p->rows; row++) {
        const int64_t *nodes = p->nodes + row * p->longest, end = p->ends[row];
        if (p->starts[row] == end) continue;
        const int64_t known = common(p, before, row), following = row + 1 < p->rows ? p->longest : 0;
        before = row;
        for (int64_t head = 0; head < p->key_heads; head++) {
            float *keys = space + 2 * head * wide * deep, *values = keys + wide * deep; /* keys: [channel, position] */
            for (int64_t t = known; t < end; t++) {
                const float *node = joined + nodes[t] * joined_row + (p->heads + head) * D;
                float key[D];
                turn(node, p->turns + t * D, 1.0f, D, key);
                set_column(keys + t, wide, key, D);
                memcpy(values + t * deep, node + p->key_heads * D, D * sizeof(float));
            }
            for (int64_t g = head * each; g < (head + 1) * each; g++)
                for (int64_t t0 = p->starts[row]; t0 < end; t0 += QUERIES) {
                    const int64_t count = queries_from(p, row, t0), width = WHOLE(t0 + count, LANES);
                    for (int64_t m = 0, t = t0; m < count; m++, t++) {
                        const float *next = joined + nodes[t + following] * joined_row;
                        ask(next + g * D, D);
                        if (g == head * each) ask(next + (p->heads + head) * D, D);
                        if (g == head * each) ask(next + (p->heads + p->key_heads + head) * D, D);
                        turn(joined + nodes[t] * joined_row + g * D, p->turns + t * D, p->scale, D, queries + m * deep);
                    }
                    memset(queries + count * deep, 0, (WHOLE(count, BLOCK) - count) * deep * sizeof(float));
                    for (int64_t m = 0; m < count; m += BLOCK, shares += BLOCK * width) {
                        const int64_t seen = t0 + m + BLOCK < end ? t0 + m + BLOCK : end, columns = WHOLE(seen, LANES);
                        block_times(shares, width, queries + m * deep, deep, 1, D, keys, wide, columns, 0);
                        soften(shares, t0 + m, columns, width);
                        block_times(out + m * deep, deep, shares, width, 1, seen, values, deep, deep, 0);
                    }
                    for (int64_t m = 0; m < count; m++)
                        memcpy(read + (nodes[t0 + m] * p->heads + g) * D, out + m * deep, D * sizeof(float));
                }
        }
    }
}

typedef struct {
    float *keys, *values, *d_keys, *d_values; /* [position, channel], but values are [channel, position] */
    float *queries, *d_queries, *slopes;      /* [query, channel] */
    float *d_scores;                          /* [query, position] */
    int64_t wide, deep;
} Space;

/* Gradients of a row's queries from t0 on; those of its keys and values are added up. */
INLINE void backward_queries(
    const Space *w, const float *shares, float scale, int64_t t0, int64_t count, const int64_t D) {
    const int64_t end = t0 + count, deep = w->deep, width = WHOLE(end, LANES);
    Mask index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int64_t m = 0; m < count; m += BLOCK) {
        const int64_t seen = t0 + m + BLOCK < end ? t0 + m + BLOCK : end, columns = WHOLE(seen, LANES);
        float *block = w->d_scores + m * width;
        block_times(block, width, w->slopes + m * deep, deep, 1, D, w->values, w->wide, columns, 0);
        memset(block + (seen - t0 - m) * width, 0, (t0 + m + BLOCK - seen) * width * sizeof(float));
        for (int64_t t = t0 + m; t < seen; t++, block += width) {
            const float *given = shares + (t - t0) * width;
            Vector sums = {0};
            for (int64_t c = 0; c < columns; c += LANES) {
                /* behind t lie values of other rows, or none */
                const Vector x = chosen(index <= (int32_t)(t - c), *(Vector *)(block + c), (Vector){0});
                sums += x * *(const Vector *)(given + c);
                *(Vector *)(block + c) = x;
            }
            const float mean = sum_of(sums);
            for (int64_t c = 0; c < columns; c += LANES)
                *(Vector *)(block + c) = (*(Vector *)(block + c) - mean) * (*(const Vector *)(given + c) * scale);
            for (int64_t c = columns; c < width; c += LANES) *(Vector *)(block + c) = (Vector){0};
        }
        block_times(w->d_queries + m * deep, deep, w->d_scores + m * width, width, 1, seen, w->keys, deep, deep, 0);
    }
    for (int64_t s = 0; s < end; s += BLOCK) {
        block_times(w->d_keys + s * deep, deep, w->d_scores + s, 1, width, count, w->queries, deep, deep, 1);
        block_times(w->d_values + s * deep, deep, shares + s, 1, width, count, w->slopes, deep, deep, 1);
    }
}

INLINE void backward_of(
    const Paths *p, const float *joined, const float *shares, const float *slope, float *out, float *space,
    const int64_t D) {
    const int64_t joined_row = (p->heads + 2 * p->key_heads) * D, each = p->heads / p->key_heads;
    const int64_t wide = WHOLE(p->longest, LANES), deep = WHOLE(D, LANES), size = wide * deep, rows = QUERIES * deep;
    float *sums = space + 2 * p->key_heads * size, *after = sums + 2 * size;
    for (int64_t row = 0, before = -1; row < p->rows; row++) {
        const int64_t *nodes = p->nodes + row * p->longest, start = p->starts[row], end = p->ends[row];
        if (start == end) continue;
        const int64_t known = common(p, before, row), following = row + 1 < p->rows ? p->longest : 0;
        before = row;
        for (int64_t head = 0; head < p->key_heads; head++) {
            float *keys = space + 2 * head * size;
            const Space w = {keys, keys + size, sums, sums + size, after, after + rows, after + 2 * rows,
                             after + 3 * rows, wide, deep};
            for (int64_t t = known; t < end; t++) {
                const float *node = joined + nodes[t] * joined_row + (p->heads + head) * D;
                turn(node, p->turns + t * D, 1.0f, D, w.keys + t * deep);
                set_column(w.values + t, wide, node + p->key_heads * D, D);
            }
            memset(w.d_keys, 0, WHOLE(end, BLOCK) * deep * sizeof(float));
            memset(w.d_values, 0, WHOLE(end, BLOCK) * deep * sizeof(float));
            for (int64_t g = head * each; g < (head + 1) * each; g++)
                for (int64_t t0 = start; t0 < end; t0 += QUERIES) {
                    const int64_t count = queries_from(p, row, t0);
                    for (int64_t m = 0, t = t0; m < count; m++, t++) {
                        const float *heard = slope + (nodes[t] * p->heads + g) * D;
                        const int64_t next = nodes[t + following];
                        ask(joined + next * joined_row + g * D, D);
                        ask(slope + (next * p->heads + g) * D, D);
                        ask_to_write(out + next * joined_row + g * D, D);
                        if (g == head * each)
                            for (int64_t part = p->heads; part < p->heads + 2 * p->key_heads; part += p->key_heads) {
                                ask(joined + next * joined_row + (part + head) * D, D);
                                ask_to_write(out + next * joined_row + (part + head) * D, D);
                            }
                        turn(joined + nodes[t] * joined_row + g * D, p->turns + t * D, 1.0f, D, w.queries + m * deep);
                        memcpy(w.slopes + m * deep, heard, D * sizeof(float));
                    }
                    memset(w.slopes + count * deep, 0, (WHOLE(count, BLOCK) - count) * deep * sizeof(float));
                    backward_queries(&w, shares, p->scale, t0, count, D);
                    for (int64_t m = 0, t = t0; m < count; m++, t++)
                        turn_back(w.d_queries + m * deep, p->turns + t * D, D, out + nodes[t] * joined_row + g * D, 0);
                    shares += WHOLE(count, BLOCK) * WHOLE(t0 + count, LANES);
                }
            for (int64_t t = 0; t < end; t++) {
                float *node = out + nodes[t] * joined_row + (p->heads + head) * D, *d_value = node + p->key_heads * D;
                const float *angles = p->turns + t * D, *from = w.d_values + t * deep;
                if (t < start) { /* a row before this one has it, too, and has written there */
                    turn_back(w.d_keys + t * deep, angles, D, node, 1);
                    for (int64_t d = 0; d < D; d++) d_value[d] += from[d];
                } else {
                    turn_back(w.d_keys + t * deep, angles, D, node, 0);
                    memcpy(d_value, from, D * sizeof(float));
                }
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

/* Writes ``out``, which has the shape of ``joined``. */
void attend_backward(
    const Paths *p, const float *joined, const float *shares, const float *slope, float *out, float *space) {
#define BACKWARD(D) backward_of(p, joined, shares, slope, out, space, D)
    CHOOSE(BACKWARD)
}
