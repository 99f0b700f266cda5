/* One fused pass over rows of fp32 logits: E = exp(z - m) in place, with m = max z, S = sum E, Q = sum E^2.
 *
 * A row is read from memory once for its maximum and once, still in cache, for everything else; the same work in tensor
 * operations walks the whole chunk seven times. Sums are carried in double over blocks that are short enough for float.
 */

#include <math.h>
#include <stdint.h>

enum { BLOCK = 1024 };

/* exp for x <= 0: 2^n * p(r) with r = x - n*ln2 in two parts, |r| <= ln2/2, and a minimax polynomial; about 1 ulp.
 * NaN stays NaN: the comparison below is false for it, and everything after is arithmetic. */
static inline float exp_nonpositive(float x) {
    const float lowest = -87.33654f; /* below, the result is subnormal: it is set to 0 */
    float clipped = x < lowest ? lowest : x;
    float n = rintf(clipped * 1.44269504f);
    float r = fmaf(n, -0.693145752f, clipped);
    r = fmaf(n, -1.42860677e-6f, r);
    float p = 1.37805939e-3f;
    p = fmaf(p, r, 8.37312452e-3f);
    p = fmaf(p, r, 4.16695364e-2f);
    p = fmaf(p, r, 1.66664720e-1f);
    p = fmaf(p, r, 4.99999851e-1f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    union { int32_t bits; float value; } scale;
    scale.bits = ((int32_t)n + 127) << 23;
    float result = p * scale.value;
    return x < lowest ? 0.0f : result;
}

void zloss_exp_rows(float *logits, int64_t rows, int64_t columns, int64_t stride, float *row_max, float *row_sum,
                    float *row_norm) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        float *z = logits + i * stride;
        float m = -INFINITY;
#pragma omp simd reduction(max : m)
        for (int64_t j = 0; j < columns; ++j) m = z[j] > m ? z[j] : m;
        double sum = 0.0, squares = 0.0;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int64_t stop = start + BLOCK < columns ? start + BLOCK : columns;
            float s = 0.0f, q = 0.0f;
#pragma omp simd reduction(+ : s, q)
            for (int64_t j = start; j < stop; ++j) {
                float e = exp_nonpositive(z[j] - m);
                z[j] = e;
                s += e;
                q += e * e;
            }
            sum += s;
            squares += q;
        }
        row_max[i] = m;
        row_sum[i] = (float)sum;
        row_norm[i] = (float)sqrt(squares);
    }
}
