/* golden/codec.safetensors: codebooks, tiles and packed words of exllamav3 1.4.1, and the error of our encoder on its
 * input tiles. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/exl3.h"
#include "kernels/kernels.h"
#include "tests/test.h"

static x3_safetensors *open_codec(void)
{
    x3_findings f = {0};
    x3_err err = {0};
    x3_safetensors *st = NULL;

    CHECK_OK(x3_safetensors_open(&st, x3_test_path(x3_test_data_dir(), "golden/codec.safetensors"), &f, &err), &err);
    return st;
}

X3_PRINTF(3, 4)
static void *load(const x3_safetensors *st, size_t n_bytes, const char *format, ...)
{
    char name[128];
    va_list args;
    void *data = NULL;
    x3_err err = {0};

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const x3_tensor *t = x3_safetensors_find(st, name);
    CHECK_MSG(t != NULL && t->n_bytes == n_bytes, "golden/codec.safetensors: %s", name);
    CHECK_OK(x3_safetensors_load(st, t, &data, &err), &err);
    return data;
}

X3_TEST(codebooks_equal_the_peer_for_all_states)
{
    x3_safetensors *st = open_codec();
    float *values = malloc(X3_STATES * sizeof *values);

    for (int cb = 0; cb < 3; cb++) {
        uint16_t *golden = load(st, X3_STATES * 2, "codebook.%s", x3_codebook_name((x3_codebook)cb));
        x3_codebook_values((x3_codebook)cb, values);
        for (int s = 0; s < X3_STATES; s++)
            CHECK_MSG(x3_f32_to_f16(values[s]) == golden[s], "%s state %d: %04x, expected %04x",
                      x3_codebook_name((x3_codebook)cb), s, x3_f32_to_f16(values[s]), golden[s]);
        free(golden);
    }
    free(values);
    x3_safetensors_close(st);
}

/* Words of the peer's tiles unpack to its states, decode to its values, and pack again to the same words. */
X3_TEST(tiles_of_the_peer_unpack_decode_and_pack_exactly)
{
    x3_safetensors *st = open_codec();
    float *values = malloc(X3_STATES * sizeof *values);

    for (int cb = 0; cb < 3; cb++) {
        x3_codebook_values((x3_codebook)cb, values);
        for (int K = 1; K <= X3_K_MAX; K++) {
            const char *name = x3_codebook_name((x3_codebook)cb);
            uint16_t *states = load(st, 8 * 512, "tiles.%s.%d.states", name, K), ours[256];
            uint16_t *decoded = load(st, 8 * 512, "tiles.%s.%d.decoded", name, K);
            uint32_t *packed = load(st, 8 * 32 * (size_t)K, "tiles.%s.%d.packed", name, K), words[64];
            for (int i = 0; i < 8; i++) {
                x3_tile_unpack(packed + i * 8 * K, K, ours);
                CHECK_MSG(memcmp(ours, states + i * 256, sizeof ours) == 0, "%s K=%d tile %d: states differ", name, K, i);
                for (int p = 0; p < 256; p++)
                    CHECK(x3_f32_to_f16(values[ours[p]]) == decoded[i * 256 + p]);
                x3_tile_pack(ours, K, words);
                CHECK_MSG(memcmp(words, packed + i * 8 * K, 32 * (size_t)K) == 0, "%s K=%d tile %d: words differ", name,
                          K, i);
            }
            free(states);
            free(decoded);
            free(packed);
        }
    }
    free(values);
    x3_safetensors_close(st);
}

X3_TEST(encoder_error_is_at_most_the_peers_on_its_tiles)
{
    x3_safetensors *st = open_codec();
    double log_sum = 0, worst = 0;

    for (int cb = 0; cb < 3; cb++)
        for (int K = 1; K <= X3_K_MAX; K++) {
            const char *name = x3_codebook_name((x3_codebook)cb);
            float *input = load(st, 8 * 1024, "tiles.%s.%d.input", name, K);
            uint16_t *decoded = load(st, 8 * 512, "tiles.%s.%d.decoded", name, K), states[8 * 256];
            double ours = 0, peer = 0;
            x3_trellis *t = NULL;
            void *scratch = NULL;
            x3_err err = {0};
            CHECK_OK(x3_trellis_create(&t, (x3_codebook)cb, K, &err), &err);
            CHECK_OK(x3_alloc(&scratch, x3_trellis_scratch_bytes(K), 1, &err), &err);
            x3_kernels_best()->trellis_search(t, input, 8, states, scratch);
            for (int i = 0; i < 8 * 256; i++) {
                ours += pow((double)t->values[states[i]] - input[i], 2);
                peer += pow((double)x3_f16_to_f32(decoded[i]) - input[i], 2);
            }
            log_sum += log(ours / peer);
            worst = fmax(worst, ours / peer);
            printf("  %s K=%d: error %.5g, peer %.5g, ratio %.4f\n", name, K, ours, peer, ours / peer);
            x3_trellis_free(t);
            free(scratch);
            free(input);
            free(decoded);
        }
    printf("  geometric mean of 24 ratios %.4f, worst %.4f\n", exp(log_sum / 24), worst);
    CHECK(exp(log_sum / 24) <= 1.0);
    CHECK(worst <= 1.01);
    x3_safetensors_close(st);
}
