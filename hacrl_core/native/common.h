/* What the kernels share. Everything is float32. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* exp within 2 units in the last place; 0 below -87, exp(88) above 88, NaN stays NaN. Written out to fill vectors. */
static inline float exp_fast(float x) {
    const float low = x < -87.0f ? -87.0f : x;
    const float clipped = low > 88.0f ? 88.0f : low;
    const float whole = rintf(clipped * 1.44269504f);
    const float rest = (clipped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}
