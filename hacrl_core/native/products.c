/* Products of many rows and a small matrix, and the gradient of that matrix. What stands on the right is laid out in
   panels of two vectors of columns; a block of rows goes through a panel with its sums in registers. Each number of the
   result is one sum in the order of the inner axis, wherever its row lies. */

#include "common.h"

#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 };
#else
enum { LANES = 8, ROWS = 6 };
#endif
enum {
    PANEL = 2 * LANES,
    NEAR = 1 << 17, /* numbers of the matrix that are used again and again, from a near cache */
    DEPTH = 128     /* rows that a gradient takes at a time: a panel of them stays in the nearest one */
};
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define WHOLE(number, of) (((number) + (of) - 1) / (of) * (of))

/* The smallest number of rows, or 0 where the registers are too few for a block. */
int64_t product_rows(void) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return ROWS;
#else
    return 0;
#endif
}

/* How many numbers the panels take. */
int64_t product_space(int64_t inner, int64_t columns) { return inner * WHOLE(columns, PANEL); }

/* Panels of a matrix [inner, columns], or of one that lies turned: [columns, inner]. Columns that only fill are zero. */
static void lay_out(const float *matrix, int64_t inner, int64_t columns, int64_t turned, float *panels) {
    for (int64_t c = 0; c < columns; c += PANEL, panels += inner * PANEL) {
        const int64_t count = columns - c < PANEL ? columns - c : PANEL;
        if (count < PANEL) memset(panels, 0, inner * PANEL * sizeof(float));
        if (turned)
            for (int64_t k = 0; k < inner; k++)
                for (int64_t j = 0; j < count; j++) panels[k * PANEL + j] = matrix[(c + j) * inner + k];
        else
            for (int64_t k = 0; k < inner; k++)
                memcpy(panels + k * PANEL, matrix + k * columns + c, count * sizeof(float));
    }
}

/* out [ROWS, PANEL] = base, or 0, plus x [ROWS, inner] times a panel [inner, PANEL]; ``x`` may lie turned in memory. */
INLINE void block(
    const float *x, int64_t x_row, int64_t x_step, int64_t inner, const float *panel, const float *base, float *out,
    int64_t out_row) {
    Vector left[ROWS], right[ROWS];
    for (int i = 0; i < ROWS; i++) {
        left[i] = base ? *(const Vector *)(base + i * out_row) : (Vector){0};
        right[i] = base ? *(const Vector *)(base + i * out_row + LANES) : (Vector){0};
    }
    for (int64_t k = 0; k < inner; k++, panel += PANEL) {
        const Vector first = *(const Vector *)panel, second = *(const Vector *)(panel + LANES);
        for (int i = 0; i < ROWS; i++) {
            const float by = x[i * x_row + k * x_step];
            left[i] += by * first;
            right[i] += by * second;
        }
    }
    for (int i = 0; i < ROWS; i++) {
        *(Vector *)(out + i * out_row) = left[i];
        *(Vector *)(out + i * out_row + LANES) = right[i];
    }
}

/* The same where the result has fewer rows or columns than a block. */
INLINE void part_block(
    const float *x, int64_t x_row, int64_t x_step, int64_t inner, const float *panel, const float *base, float *out,
    int64_t out_row, int64_t rows, int64_t columns) {
    float tile[ROWS * PANEL] = {0};
    for (int64_t i = 0; base && i < rows; i++) memcpy(tile + i * PANEL, base + i * out_row, columns * sizeof(float));
    block(x, x_row, x_step, inner, panel, tile, tile, PANEL);
    for (int64_t i = 0; i < rows; i++) memcpy(out + i * out_row, tile + i * PANEL, columns * sizeof(float));
}

/* out [rows, columns] = base, or 0, plus x [rows, inner] times the matrix. Rows are at least ROWS: the last block begins
   so early that it is whole, and computes some rows again. ``space`` takes the panels. */
void product(
    const float *x, const float *matrix, const float *base, float *out, float *space, int64_t rows, int64_t inner,
    int64_t columns, int64_t turned) {
    lay_out(matrix, inner, columns, turned, space);
    const int64_t wide = NEAR / inner > PANEL ? NEAR / inner / PANEL * PANEL : PANEL;
    for (int64_t c0 = 0; c0 < columns; c0 += wide)
        for (int64_t done = 0; done < rows; done += ROWS) {
            const int64_t row = done + ROWS <= rows ? done : rows - ROWS;
            for (int64_t c = c0; c < columns && c < c0 + wide; c += PANEL) {
                const int64_t at = row * columns + c;
                const float *from = x + row * inner, *panel = space + c * inner;
                if (c + PANEL > columns)
                    part_block(
                        from, inner, 1, inner, panel, base ? base + at : NULL, out + at, columns, ROWS, columns - c);
                else if (base)
                    block(from, inner, 1, inner, panel, base + at, out + at, columns);
                else
                    block(from, inner, 1, inner, panel, NULL, out + at, columns);
            }
        }
}

/* How many numbers a gradient needs beside its inputs and output. */
int64_t gradient_space(int64_t outer) { return DEPTH * (PANEL + WHOLE(outer, ROWS)); }

/* Some columns of a matrix [rows, width] as [rows, whole]; those that are not there are zero. */
INLINE void gather(const float *from, int64_t rows, int64_t width, int64_t column, int64_t whole, float *to) {
    from += column;
    if (column + whole <= width)
        for (int64_t r = 0; r < rows; r++) memcpy(to + r * whole, from + r * width, whole * sizeof(float));
    else
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < whole; j++) to[r * whole + j] = column + j < width ? from[r * width + j] : 0.0f;
}

/* out [outer, inner] = slope [rows, outer], turned, times x [rows, inner] */
void gradient(
    const float *slope, const float *x, float *out, float *space, int64_t rows, int64_t outer, int64_t inner) {
    float *panel = space, *blocks = space + DEPTH * PANEL;
    for (int64_t r = 0; r < rows; r += DEPTH) {
        const int64_t depth = rows - r < DEPTH ? rows - r : DEPTH;
        for (int64_t n = 0; n < outer; n += ROWS) gather(slope + r * outer, depth, outer, n, ROWS, blocks + n * DEPTH);
        for (int64_t c = 0; c < inner; c += PANEL) {
            gather(x + r * inner, depth, inner, c, PANEL, panel);
            const int64_t columns = inner - c < PANEL ? inner - c : PANEL;
            for (int64_t n = 0; n < outer; n += ROWS) {
                const int64_t count = outer - n < ROWS ? outer - n : ROWS;
                float *to = out + n * inner + c;
                const float *from = blocks + n * DEPTH, *base = r ? to : NULL;
                if (count < ROWS || columns < PANEL)
                    part_block(from, 1, ROWS, depth, panel, base, to, inner, count, columns);
                else
                    block(from, 1, ROWS, depth, panel, base, to, inner);
            }
        }
    }
}
