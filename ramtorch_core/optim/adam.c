/* Adam and AdamW in one pass over memory: gradient in, state and master updated, shadow out.
 *
 * Every operation is the one that torch's own kernels do, in the same order and rounding, so results are equal bit for
 * bit: it follows torch._fused_adam(w)_. There, elements that fill no whole vector at the end of a tensor go through
 * scalar code, in which the compiler chose another fused multiply-add. Compile with -ffp-contract=off: the only fused
 * multiply-adds are those written as such.
 *
 * Masters and moments may be bfloat16. Arithmetic is in float32 all the same, and what is stored is rounded up or down at
 * random, so that it is right on average; the random bits are those of rounding.py, a function of a weight's key and the
 * element's index alone. The gradient is taken, and scaled, in the master's dtype.
 *
 * What is overwritten may be kept: it is copied, piece by piece, while it is in the cache anyway, past the cache. So is
 * the shadow, which would otherwise be read from memory only to be overwritten.
 *
 * Work is dealt out in blocks of BLOCK elements to threads that live for one call. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 16384 /* elements: threads end at about the same time */
#define PIECE 2048  /* elements: with their state 32 KB, which fits the first-level cache */
#define SHARE 65536 /* elements for which a thread is worth its start */
#define MAXIMUM_THREADS 256
#define STACK (1 << 19) /* bytes, so few that the C library keeps the stacks of ended threads for those of the next call */

enum { NONE, FLOAT32, BFLOAT16 };

/* One weight. All arrays have `count` elements; `shadow` is NULL if the master is its own shadow. `kept` are where the
 * former values of master, exp_avg and exp_avg_sq go, aligned to 16 bytes; NULL if nobody wants them. */
typedef struct {
    void *master, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *shadow;
    void *kept[3];
    int64_t count;
    int32_t master_dtype, moment_dtype, grad_dtype, shadow_dtype;
    int32_t width;              /* of torch's vectors; a power of two that divides BLOCK */
    uint32_t key0, key1;        /* of this weight and step: what random bits depend on besides the index */
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

/* Up or down with the probabilities that make it right on average, by 16 random bits; infinities and NaN stay. */
static inline uint16_t narrow_randomly(float value, uint32_t random) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7FC0 : (uint16_t)((bits + random) >> 16);
}

/* 32 random bits for a counter: the mixing function "lowbias32" of C. Wellons' hash prospector, with the second half of
 * the key between its rounds. */
static inline uint32_t random_bits(uint32_t x, uint32_t key1) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x ^= key1;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

/* 32 more, of which the upper 16 are independent of either half of the first. */
static inline uint32_t more_bits(uint32_t x) {
    x *= 0x9E3779B1u;
    return x ^ x >> 16;
}

/* torch.lerp(start, end, weight), as its vectorised kernel computes it. */
static inline float lerp(float start, float end, float weight) {
    int small = weight < 0.5f;
    return fmaf(small ? weight : weight - 1.0f, end - start, small ? start : end);
}

typedef float type_FLOAT32;
typedef uint16_t type_BFLOAT16;
#define LOAD_FLOAT32(value) (value)
#define LOAD_BFLOAT16(value) widen(value)
#define ROUND_FLOAT32(value) (value)
#define ROUND_BFLOAT16(value) widen(narrow(value))
#define GRAD_FLOAT32(GRAD, value) LOAD_##GRAD(value)
#define GRAD_BFLOAT16(GRAD, value) LOAD_ROUNDED_##GRAD(value)
#define LOAD_ROUNDED_FLOAT32(value) ROUND_BFLOAT16(value)
#define LOAD_ROUNDED_BFLOAT16(value) widen(value)
#define STORE_FLOAT32(value, random) ((void)(random), (value))
#define STORE_BFLOAT16(value, random) narrow_randomly(value, random)
#define SHADOW_NONE(value)
#define SHADOW_BFLOAT16(value) shadow[i] = narrow(value)

#define DEFINE(NAME, MASTER, MOMENT, GRAD, SHADOW)                                                                      \
    static inline __attribute__((always_inline)) void NAME##_range(const Weight *w, uint16_t *restrict shadow,          \
                                                                   int64_t begin, int64_t end, int scalar) {            \
        type_##MASTER *restrict master = (type_##MASTER *)w->master + begin;                                            \
        type_##MOMENT *restrict exp_avg = (type_##MOMENT *)w->exp_avg + begin;                                          \
        type_##MOMENT *restrict exp_avg_sq = (type_##MOMENT *)w->exp_avg_sq + begin;                                    \
        const type_##GRAD *restrict grads = (const type_##GRAD *)w->grad + begin;                                       \
        const float scale = w->grad_scale, decay = w->decay, l2 = w->l2, beta2 = w->beta2;                              \
        const float lerp_weight = w->lerp_weight, exp_avg_sq_weight = w->exp_avg_sq_weight;                             \
        const float negative_step_size = w->negative_step_size, eps = w->eps;                                           \
        const float bias_correction2_sqrt = w->bias_correction2_sqrt;                                                   \
        const uint32_t first = (uint32_t)begin, key1 = w->key1;                                                         \
        const uint32_t key0 = w->key0 + (uint32_t)(begin >> 32) * 0x9E3779B1u;                                          \
        const int32_t count = (int32_t)(end - begin);                                                                   \
        (void)shadow;                                                                                                   \
        for (int32_t i = 0; i < count; i++) {                                                                           \
            uint32_t random = random_bits((first + (uint32_t)i) ^ key0, key1);                                          \
            float grad = GRAD_##MASTER(GRAD, grads[i]), p = LOAD_##MASTER(master[i]);                                   \
            grad = ROUND_##MASTER(grad * scale);                                                                        \
            grad = fmaf(p, l2, grad);                                                                                   \
            p = p * decay;                                                                                              \
            float m = lerp(LOAD_##MOMENT(exp_avg[i]), grad, lerp_weight);                                               \
            float v = LOAD_##MOMENT(exp_avg_sq[i]), g = exp_avg_sq_weight * grad;                                       \
            v = scalar ? fmaf(v, beta2, g * grad) : fmaf(g, grad, v * beta2);                                           \
            exp_avg[i] = STORE_##MOMENT(m, random & 0xFFFF);                                                            \
            exp_avg_sq[i] = STORE_##MOMENT(v, random >> 16);                                                            \
            p = p + negative_step_size * m / (sqrtf(v) / bias_correction2_sqrt + eps);                                  \
            master[i] = STORE_##MASTER(p, more_bits(random) >> 16);                                                     \
            SHADOW_##SHADOW(p);                                                                                         \
        }                                                                                                               \
    }                                                                                                                   \
    static void NAME(const Weight *w, uint16_t *shadow, int64_t begin, int64_t end) {                                   \
        int64_t vectors = w->count - w->count % w->width, middle = begin < vectors ? vectors : begin;                   \
        if (begin < middle) NAME##_range(w, shadow, begin, end < middle ? end : middle, 0);                             \
        if (middle < end) NAME##_range(w, shadow + (middle - begin), middle, end, 1);                                   \
    }

DEFINE(update_ffff, FLOAT32, FLOAT32, FLOAT32, NONE)
DEFINE(update_fffb, FLOAT32, FLOAT32, FLOAT32, BFLOAT16)
DEFINE(update_ffbf, FLOAT32, FLOAT32, BFLOAT16, NONE)
DEFINE(update_ffbb, FLOAT32, FLOAT32, BFLOAT16, BFLOAT16)
DEFINE(update_fbff, FLOAT32, BFLOAT16, FLOAT32, NONE)
DEFINE(update_fbfb, FLOAT32, BFLOAT16, FLOAT32, BFLOAT16)
DEFINE(update_fbbf, FLOAT32, BFLOAT16, BFLOAT16, NONE)
DEFINE(update_fbbb, FLOAT32, BFLOAT16, BFLOAT16, BFLOAT16)
DEFINE(update_bff, BFLOAT16, FLOAT32, FLOAT32, NONE)
DEFINE(update_bfb, BFLOAT16, FLOAT32, BFLOAT16, NONE)
DEFINE(update_bbf, BFLOAT16, BFLOAT16, FLOAT32, NONE)
DEFINE(update_bbb, BFLOAT16, BFLOAT16, BFLOAT16, NONE)

typedef void Update(const Weight *, uint16_t *, int64_t, int64_t);
static Update *const UPDATES[16] = { /* bits: master, moments, gradient, shadow in bfloat16 */
    update_ffff, update_fffb, update_ffbf, update_ffbb, update_fbff, update_fbfb, update_fbbf, update_fbbb,
    update_bff,  NULL,        update_bfb,  NULL,        update_bbf,  NULL,        update_bbb,  NULL};

/* A copy that is not needed soon: where that can be said, it goes to memory without being read from there before. */
static void copy_past_cache(char *to, const char *from, size_t bytes) {
    size_t i = 0;
#ifdef __SSE2__
    for (; i + 16 <= bytes; i += 16) _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
#endif
    memcpy(to + i, from + i, bytes - i);
}

static void keep(const Weight *w, int64_t begin, int64_t end) {
    const char *now[3] = {w->master, w->exp_avg, w->exp_avg_sq};
    for (int i = 0; i < 3; i++) {
        size_t size = (i ? w->moment_dtype : w->master_dtype) == BFLOAT16 ? 2 : 4;
        if (w->kept[i])
            copy_past_cache((char *)w->kept[i] + begin * size, now[i] + begin * size, (size_t)(end - begin) * size);
    }
}

/* The shadow of a piece. */
static void write_shadow(const Weight *w, const uint16_t *halves, int64_t begin, int64_t end) {
    uint16_t *to = (uint16_t *)w->shadow + begin;
    size_t bytes = (size_t)(end - begin) * sizeof *to;
    if ((uintptr_t)to % 16 == 0)
        copy_past_cache((char *)to, (const char *)halves, bytes);
    else
        memcpy(to, halves, bytes);
}

static void update(const Weight *w, int64_t begin, int64_t end) {
    int master = w->master_dtype == BFLOAT16, moments = w->moment_dtype == BFLOAT16;
    int grad = w->grad_dtype == BFLOAT16, shadow = w->shadow_dtype == BFLOAT16;
    Update *step = UPDATES[master << 3 | moments << 2 | grad << 1 | shadow];
    uint16_t halves[PIECE];
    for (int64_t next; begin < end; begin = next) {
        next = begin + PIECE < end ? begin + PIECE : end;
        keep(w, begin, next);
        step(w, halves, begin, next);
        if (shadow) write_shadow(w, halves, begin, next);
    }
}

static void *run(void *argument) {
    Work *work = argument;
    for (;;) {
        int64_t block = __atomic_fetch_add(&work->next_block, 1, __ATOMIC_RELAXED);
        if (block >= work->block_count) break;
        const Weight *w = work->weights;
        for (int64_t blocks; block >= (blocks = (w->count + BLOCK - 1) / BLOCK); w++) block -= blocks;
        int64_t begin = block * BLOCK, end = begin + BLOCK;
        update(w, begin, end < w->count ? end : w->count);
    }
#ifdef __SSE2__
    _mm_sfence(); /* copies past the cache are there before the thread says that it is done */
#endif
    return NULL;
}

/* Whether another thread works too. With much thread-local memory in the process, small stacks are refused. */
static int start(pthread_t *thread, const pthread_attr_t *small, Work *work) {
    return pthread_create(thread, small, run, work) == 0 || pthread_create(thread, NULL, run, work) == 0;
}

/* Update `count` weights with up to `threads` threads; returns when all are done. */
void ramtorch_adam(const Weight *weights, int64_t count, int32_t threads) {
    Work work = {weights, count, 0, 0};
    int64_t elements = 0;
    for (int64_t i = 0; i < count; i++) {
        elements += weights[i].count;
        work.block_count += (weights[i].count + BLOCK - 1) / BLOCK;
    }
    if (threads > elements / SHARE + 1) threads = (int32_t)(elements / SHARE + 1);
    if (threads > MAXIMUM_THREADS) threads = MAXIMUM_THREADS;
    pthread_t others[MAXIMUM_THREADS];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK);
    int started = 0;
    while (started < threads - 1 && start(&others[started], &small, &work)) started++;
    pthread_attr_destroy(&small);
    run(&work);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
}
