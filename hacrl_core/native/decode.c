/* One decoding step of small Llama-style models between its matrix products. Everything is float32 and row by row: what
   a row gets does not depend on its neighbours. Heads have their channels in pairs (see weights.py). */

#include "common.h"

/* Rows divided by their root mean square, without a weight. */
void norm_rows(const float *x, float *out, int64_t rows, int64_t width, float epsilon) {
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
        const float scale = 1.0f / sqrtf(sum / width + epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale;
    }
}

/* silu(gate) * up for rows that hold the gate and then up; written to rows of half the width. */
void gate_rows(const float *both, float *out, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, both += 2 * width, out += width) {
        const float *gate = both, *up = both + width;
        for (int64_t i = 0; i < width; i++) out[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

/* So many slots ahead memory is asked for: one that begins on another page is not foreseen by the CPU itself. */
enum { AHEAD = 2 };

typedef struct {
    int64_t rows, heads, key_heads, channels;
    float scale, epsilon;
    const float *turns;       /* [position, channels]: cosine and sine of each pair */
    const float *qk_norm;     /* [heads + key_heads, channels], or NULL */
    const int64_t *positions; /* [rows] of the new tokens */
    const int64_t *lengths;   /* [rows]: how many positions of a row's slot are written; the new token goes there */
    const int64_t *groups;    /* [rows]: the prefix of a row */
    const int64_t *shared;    /* [rows]: how many positions of it count; NULL without prefixes */
    int64_t slot_length, prefix_length;
} Step;

/* Turn a head by its position's angles; norm it first where the model does. */
static inline void turn_head(const Step *s, const float *head, int64_t index, const float *angles, float *out) {
    const int64_t D = s->channels;
    float normed[D];
    if (s->qk_norm) {
        norm_rows(head, normed, 1, D, s->epsilon);
        for (int64_t d = 0; d < D; d++) normed[d] *= s->qk_norm[index * D + d];
        head = normed;
    }
    for (int64_t d = 0; d < D; d += 2) {
        out[d] = head[d] * angles[d] - head[d + 1] * angles[d + 1];
        out[d + 1] = head[d] * angles[d + 1] + head[d + 1] * angles[d];
    }
}

/* ``ahead``: so many numbers further lies what is read after this slot; it is asked for in the same rhythm. */
static inline __attribute__((always_inline)) void score_keys(
    const float *query, const float *keys, int64_t count, int64_t D, int64_t ahead, float *scores) {
    for (int64_t t = 0; t < count; t++, keys += D) {
        for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(keys + ahead + d, 0, 2);
        float sum = 0.0f;
        for (int64_t d = 0; d < D; d++) sum += query[d] * keys[d];
        scores[t] = sum;
    }
}

static inline __attribute__((always_inline)) void add_values(
    const float *weights, const float *values, int64_t count, int64_t D, int64_t ahead, float *out) {
    for (int64_t t = 0; t < count; t++, values += D) {
        for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(values + ahead + d, 0, 2);
        for (int64_t d = 0; d < D; d++) out[d] += weights[t] * values[d];
    }
}

static inline __attribute__((always_inline)) void attend_rows(
    const Step *s, const float *qkv, float *keys, float *values, const float *prefix_keys, const float *prefix_values,
    float *mixed, float *scores, const int64_t D) {
    const int64_t wide = s->heads + 2 * s->key_heads, each = s->heads / s->key_heads;
    for (int64_t b = 0; b < s->rows; b++) {
        const float *row = qkv + b * wide * D, *angles = s->turns + s->positions[b] * D;
        const int64_t own = s->lengths[b] + 1, before = s->shared ? s->shared[b] : 0;
        for (int64_t h = 0; h < s->key_heads; h++) {
            float *slot_keys = keys + (b * s->key_heads + h) * s->slot_length * D;
            float *slot_values = values + (b * s->key_heads + h) * s->slot_length * D;
            turn_head(s, row + (s->heads + h) * D, s->heads + h, angles, slot_keys + (own - 1) * D);
            memcpy(slot_values + (own - 1) * D, row + (s->heads + s->key_heads + h) * D, D * sizeof(float));
            const int64_t start = before ? (s->groups[b] * s->key_heads + h) * s->prefix_length * D : 0;
            for (int64_t g = h * each; g < (h + 1) * each; g++) {
                float query[D], out[D], sum = 0.0f;
                turn_head(s, row + g * D, g, angles, query);
                for (int64_t d = 0; d < D; d++) query[d] *= s->scale, out[d] = 0.0f;
                if (before) score_keys(query, prefix_keys + start, before, D, 0, scores);
                score_keys(query, slot_keys, own, D, AHEAD * s->slot_length * D, scores + before);
                float top = scores[0];
                for (int64_t t = 1; t < before + own; t++) top = scores[t] > top ? scores[t] : top;
                for (int64_t t = 0; t < before + own; t++) scores[t] = exp_fast(scores[t] - top);
                for (int64_t t = 0; t < before + own; t++) sum += scores[t];
                if (before) add_values(scores, prefix_values + start, before, D, 0, out);
                add_values(scores + before, slot_values, own, D, AHEAD * s->slot_length * D, out);
                const float share = 1.0f / sum;
                for (int64_t d = 0; d < D; d++) mixed[(b * s->heads + g) * D + d] = out[d] * share;
            }
        }
    }
}

/* Attention of one layer: from the joined projections of the new tokens, [rows, heads + 2 key heads, channels], to what
   each of them reads, [rows, heads, channels]. Their keys and values are written into the slots, which are
   [slot, key head, position, channel]; prefixes are [group, key head, position, channel]. */
void attend(
    const Step *s, const float *qkv, float *keys, float *values, const float *prefix_keys, const float *prefix_values,
    float *mixed, float *scores) {
#define CASE(D)                                                                              \
    case D:                                                                                  \
        attend_rows(s, qkv, keys, values, prefix_keys, prefix_values, mixed, scores, D);     \
        break;
    switch (s->channels) {
        CASE(16)
        CASE(24)
        CASE(32)
        CASE(64)
        default:
            attend_rows(s, qkv, keys, values, prefix_keys, prefix_values, mixed, scores, s->channels);
    }
#undef CASE
}

/* Draw a token of each row by the inverse of the CDF, as sampling.py does: the first whose cumulated weight passes
   ``uniforms`` times their sum. ``cumulated`` has room for a row. Returns how many rows have no finite positive sum. */
int64_t draw_rows(
    const float *logits, const double *uniforms, int64_t rows, int64_t vocabulary, float temperature, double margin,
    double floor, double *cumulated, int64_t *tokens, double *logprobs, uint8_t *ambiguous) {
    int64_t failed = 0;
    for (int64_t r = 0; r < rows; r++, logits += vocabulary) {
        float top = logits[0];
        double sum = 0.0;
        for (int64_t v = 1; v < vocabulary; v++) top = logits[v] > top ? logits[v] : top;
        const float peak = top / temperature;
        for (int64_t v = 0; v < vocabulary; v++) cumulated[v] = exp_fast(logits[v] / temperature - peak);
        for (int64_t v = 0; v < vocabulary; v++) cumulated[v] = sum += cumulated[v];
        if (!(sum > 0.0 && sum < INFINITY)) {
            failed++;
            continue;
        }
        const double below = nextafter(sum, 0.0), wanted = uniforms[r] * sum, target = wanted < below ? wanted : below;
        int64_t low = 0, high = vocabulary - 1; /* the last one's is the sum, which is above the target */
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (cumulated[middle] > target) high = middle;
            else low = middle + 1;
        }
        const double before = low ? cumulated[low - 1] : 0.0, weight = cumulated[low] - before;
        const double above = cumulated[low] - target, under = weight - above;
        tokens[r] = low;
        logprobs[r] = (double)(logits[low] / temperature - peak) - log(sum);
        ambiguous[r] = (above < under ? above : under) < margin * sum && weight > floor * sum;
    }
    return failed;
}
