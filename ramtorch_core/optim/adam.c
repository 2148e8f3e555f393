/* Adam and AdamW in one pass over memory: gradient in, state and master updated, shadow out.
 *
 * Every operation is the one that torch's own kernels do, in the same order and rounding, so results are equal bit for
 * bit: `fused` follows torch._fused_adam(w)_, otherwise the sequence of elementwise operations of torch.optim's
 * single-tensor implementation. Compile with -ffp-contract=off: the only fused multiply-adds are those written as such.
 *
 * Work is dealt out in blocks of BLOCK elements to threads that live for one call. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 65536 /* elements: with their state about 1 MB, which fits the second-level cache */
#define MAXIMUM_THREADS 256

enum { NONE, FLOAT32, BFLOAT16 };

/* One weight. All arrays have `count` elements; `shadow` is NULL if the master is its own shadow. */
typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *shadow;
    int64_t count;
    int32_t grad_dtype, shadow_dtype;
    float grad_scale;           /* what clipping multiplies the gradient with */
    float decay;                /* AdamW: 1 - lr * weight_decay; 1 without */
    float l2;                   /* Adam: weight_decay, added to the gradient; 0 without */
    float beta2, lerp_weight, exp_avg_sq_weight; /* beta2, 1 - beta1, 1 - beta2 */
    float negative_step_size, bias_correction2_sqrt, eps;
} Weight;

typedef struct {
    const Weight *weights;
    int64_t weight_count, block_count;
    int64_t next_block;
} Work;

static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrow(float value) { /* to nearest, ties to even; NaN stays NaN, as in torch */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7FC0 : (uint16_t)rounded;
}

/* torch.lerp(start, end, weight), as its vectorised kernel computes it. */
static inline float lerp(float start, float end, float weight) {
    int small = weight < 0.5f;
    return fmaf(small ? weight : weight - 1.0f, end - start, small ? start : end);
}

#define LOAD_FLOAT32(i) ((const float *)w->grad)[i]
#define LOAD_BFLOAT16(i) widen(((const uint16_t *)w->grad)[i])
#define STORE_NONE(i, value)
#define STORE_BFLOAT16(i, value) ((uint16_t *)w->shadow)[i] = narrow(value)

#define UPDATE(LOAD, STORE)                                                                       \
    for (int64_t i = begin; i < end; i++) {                                                       \
        float grad = LOAD(i) * w->grad_scale, p = master[i];                                      \
        grad = fmaf(p, l2, grad);                                                                   \
        p = p * decay;                                                                            \
        float m = lerp(exp_avg[i], grad, lerp_weight);                                            \
        float v = fmaf(exp_avg_sq_weight * grad, grad, exp_avg_sq[i] * beta2);                       \
        exp_avg[i] = m;                                                                           \
        exp_avg_sq[i] = v;                                                                        \
        p = p + negative_step_size * m / (sqrtf(v) / bias_correction2_sqrt + eps);                \
        master[i] = p;                                                                            \
        STORE(i, p);                                                                              \
    }

static void update(const Weight *w, int64_t begin, int64_t end) {
    float *restrict master = w->master, *restrict exp_avg = w->exp_avg, *restrict exp_avg_sq = w->exp_avg_sq;
    const float decay = w->decay, l2 = w->l2, beta2 = w->beta2, lerp_weight = w->lerp_weight;
    const float exp_avg_sq_weight = w->exp_avg_sq_weight, negative_step_size = w->negative_step_size;
    const float bias_correction2_sqrt = w->bias_correction2_sqrt, eps = w->eps;
    if (w->grad_dtype == BFLOAT16 && w->shadow_dtype == BFLOAT16) {
        UPDATE(LOAD_BFLOAT16, STORE_BFLOAT16)
    } else if (w->grad_dtype == BFLOAT16) {
        UPDATE(LOAD_BFLOAT16, STORE_NONE)
    } else if (w->shadow_dtype == BFLOAT16) {
        UPDATE(LOAD_FLOAT32, STORE_BFLOAT16)
    } else {
        UPDATE(LOAD_FLOAT32, STORE_NONE)
    }
}

static void *run(void *argument) {
    Work *work = argument;
    for (;;) {
        int64_t block = __atomic_fetch_add(&work->next_block, 1, __ATOMIC_RELAXED);
        if (block >= work->block_count) return NULL;
        const Weight *w = work->weights;
        for (int64_t blocks; block >= (blocks = (w->count + BLOCK - 1) / BLOCK); w++) block -= blocks;
        int64_t begin = block * BLOCK, end = begin + BLOCK;
        update(w, begin, end < w->count ? end : w->count);
    }
}

/* Update `count` weights with up to `threads` threads; returns when all are done. */
void ramtorch_adam(const Weight *weights, int64_t count, int32_t threads) {
    Work work = {weights, count, 0, 0};
    for (int64_t i = 0; i < count; i++) work.block_count += (weights[i].count + BLOCK - 1) / BLOCK;
    if (threads > work.block_count) threads = (int32_t)work.block_count;
    if (threads > MAXIMUM_THREADS) threads = MAXIMUM_THREADS;
    pthread_t others[MAXIMUM_THREADS];
    int started = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, run, &work) == 0) started++;
    run(&work);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
}
