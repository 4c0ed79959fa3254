/* The draft layer (MTP) of a family: names and descriptors. transformers has no forward for it; what is computed is what vLLM
 * and SGLang compute for these families. */
#include <stdio.h>
#include <string.h>

#include "runtime/model_internal.h"

bool x3_build_draft_reads(const x3_family *f, const char *key)
{
    return f->draft == X3_DRAFT_MTP &&
           (strcmp(key, "mtp_num_hidden_layers") == 0 || strcmp(key, "mtp_use_dedicated_embeddings") == 0);
}

/* Draft layers that the config tells of; those of a family that names them mtp are one where it does not say. */
static x3_status read_count(x3_builder *b, int64_t *n)
{
    bool own_embedding = false;
    x3_status rc;

    *n = b->f->draft == X3_DRAFT_MTP ? 1 : 0;
    X3_TRY(rc, out, x3_json_int(b->text, "num_nextn_predict_layers", 0, X3_LAYERS_MAX, false, n, b->c->path, b->err));
    if (b->f->draft == X3_DRAFT_MTP)
        X3_TRY(rc, out, x3_json_int(b->text, "mtp_num_hidden_layers", 0, X3_LAYERS_MAX, false, n, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "mtp_use_dedicated_embeddings", false, &own_embedding, b->c->path, b->err));
    if (b->f->draft == X3_DRAFT_NONE)
        b->m->no_draft = "how draft layers of this family compute is not known here";
    else if (*n == 0)
        b->m->no_draft = "its config tells of no draft layers";
    else if (*n > 1)
        b->m->no_draft = "it has several draft layers, and what the second one reads is not known here";
    else if (own_embedding)
        b->m->no_draft = "its draft layer has an embedding of its own (mtp_use_dedicated_embeddings)";
out:
    return rc;
}

struct names {
    const char *join, *embed_norm, *hidden_norm, *out_norm, *head;
};

static const struct names nextn = {"eh_proj", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "shared_head.head"};
static const struct names mtp = {"fc", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", NULL};

static x3_status full_name(x3_builder *b, const char *prefix, const char *part, const char **out)
{
    char *name = NULL;
    x3_status rc = x3_arena_printf(&b->m->arena, &name, b->err, "%s.%s", prefix, part);

    *out = name;
    return rc;
}

static x3_status norm(x3_builder *b, const char *prefix, const char *part, x3_vector_desc *out)
{
    *out = (x3_vector_desc){.n = b->m->hidden, .add = b->f->centred_norms ? 1 : 0};
    return full_name(b, prefix, part, &out->name);
}

x3_status x3_build_draft(x3_builder *b)
{
    const bool is_mtp = b->f->draft == X3_DRAFT_MTP;
    const struct names *n = is_mtp ? &mtp : &nextn;
    const size_t hidden = b->m->hidden;
    const char *prefix = "mtp", *layer = "mtp.layers.0";
    x3_draft_desc *d;
    int64_t count;
    x3_status rc;

    X3_TRY(rc, out, read_count(b, &count));
    if (b->m->no_draft != NULL)
        goto out;
    if (!is_mtp) {
        char *name;
        X3_TRY(rc, out, x3_arena_printf(&b->m->arena, &name, b->err, "%s.layers.%zu", b->prefix, b->m->n_layers));
        prefix = layer = name;
    }
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &d, 1, sizeof *d, b->err));
    d->join = (x3_linear_desc){.n_in = 2 * hidden, .n_out = hidden, .quantized = true};
    X3_TRY(rc, out, full_name(b, prefix, n->join, &d->join.name));
    if (n->head != NULL) {
        d->head = (x3_linear_desc){.n_in = hidden, .n_out = b->m->vocab, .quantized = true};
        X3_TRY(rc, out, full_name(b, prefix, n->head, &d->head.name));
    }
    X3_TRY(rc, out, norm(b, prefix, n->embed_norm, &d->embed_norm));
    X3_TRY(rc, out, norm(b, prefix, n->hidden_norm, &d->hidden_norm));
    X3_TRY(rc, out, norm(b, prefix, n->out_norm, &d->out_norm));
    /* with experts wherever the family has any, whatever layers before it have */
    X3_TRY(rc, out, x3_build_layer(b, &b->m->layers[b->m->n_layers], layer, b->m->n_layers, b->f->moe != NULL, true));
    b->m->draft = d;
out:
    return rc;
}
