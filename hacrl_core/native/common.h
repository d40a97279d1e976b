/* What the kernels share. Everything is float32. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* a * b + c, which the compiler may not join with its neighbours: flags that let it reorder sums would let it add up the
   two parts of log(2) below, and with them goes what they are in two parts for. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define TIMES_PLUS(a, b, c) fmaf(a, b, c)
#elif defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TIMES_PLUS(a, b, c) __builtin_assoc_barrier((a) * (b) + (c))
#else
#define TIMES_PLUS(a, b, c) ((a) * (b) + (c))
#endif

/* exp within 2 units in the last place; 0 below -87, exp(88) above 88, NaN stays NaN. Written out to fill vectors. */
static inline float exp_fast(float x) {
    const float low = x < -87.0f ? -87.0f : x;
    const float clipped = low > 88.0f ? 88.0f : low;
    const float whole = rintf(clipped * 1.44269504f);
    const float rest = TIMES_PLUS(whole, 2.12194440e-4f, TIMES_PLUS(whole, -0.693359375f, clipped));
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23; /* NaN becomes some number, and p stays NaN */
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}
