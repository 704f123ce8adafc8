// A step's whole decoder in one call: no op is dispatched, no tensor made, and the threads meet at
// barriers of the pool only. Each stage calls what the single ops call, in their order, so that a
// row has the same bits either way.
#include <algorithm>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "batch.h"
#include "buffer.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"
#include "threads.h"

namespace firsttoken {

struct DecoderShape {
  int64_t hidden_size;  // H
  int64_t inner_size;   // F
  HeadShape heads;
  float rms_norm_eps;
  float attention_scale;
};

struct DecoderLayer {
  const float* input_norm_H;
  PackedMatrix qkv;
  const float* qkv_bias_O;  // biases and head norms may be null
  const float* q_norm_D;
  const float* k_norm_D;
  PackedMatrix output;
  const float* output_bias_H;
  const float* post_attention_norm_H;
  PackedMatrix gate_up;
  const float* gate_up_bias_G;
  PackedMatrix down;
  const float* down_bias_H;
  int64_t sliding_window;  // tokens; 0: none
};

// The cache of all layers, [layers, 2, B, ...], see KVLayer.
struct KVCache {
  uint8_t* data;
  int64_t bytes_per_half_layer;  // the keys, or the values, of a layer
  int64_t block_size;
  int32_t is_half;
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, const float* cos_sin_PD)
      : shape_(shape), cos_sin_PD_(cos_sin_PD) {}

  void add_layer(const DecoderLayer& layer) { layers_.push_back(layer); }

  // `hidden_TH`: the embedded tokens; becomes what the last layer leaves, before the final norm.
  void forward(ThreadPool& pool, const Batch& batch, const KVCache& cache, float* hidden_TH);

 private:
  void attend(ThreadPool& pool, const Batch& batch, const DecoderLayer& layer,
              const KVLayer& cache, float* hidden_TH);
  void feed_forward(ThreadPool& pool, int64_t num_tokens, const DecoderLayer& layer,
                    float* hidden_TH);
  void normalise(ThreadPool& pool, Format format, int64_t num_tokens, const float* norm_H,
                 const float* hidden_TH);

  float* scratch_of(int thread) { return scratch_.data() + thread * scratch_size_; }

  DecoderShape shape_;
  const float* cos_sin_PD_;
  std::vector<DecoderLayer> layers_;

  // Grown to the largest step seen.
  PreparedRows rows_;
  FloatBuffer qkv_TO_;
  FloatBuffer attended_TO_;
  FloatBuffer gate_up_TG_;  // or what becomes of it, [T, F]
  FloatBuffer scratch_;  // one row for each thread
  int64_t scratch_size_ = 0;
};

void Decoder::forward(ThreadPool& pool, const Batch& batch, const KVCache& cache,
                      float* hidden_TH) {
  const HeadShape& heads = shape_.heads;
  const int64_t num_tokens = batch.num_tokens;
  const int64_t num_qkv_heads = heads.num_heads + 2 * heads.num_kv_heads;
  qkv_TO_.reserve(num_tokens * row_stride(num_qkv_heads * heads.head_dim));
  attended_TO_.reserve(num_tokens * row_stride(heads.num_heads * heads.head_dim));
  gate_up_TG_.reserve(num_tokens * row_stride(2 * shape_.inner_size));
  scratch_size_ = std::max(shape_.hidden_size, shape_.inner_size);
  scratch_.reserve(pool.num_threads() * scratch_size_);

  uint8_t* keys = cache.data;
  for (const DecoderLayer& layer : layers_) {
    const KVLayer layer_cache{keys, keys + cache.bytes_per_half_layer, cache.is_half != 0,
                              cache.block_size};
    attend(pool, batch, layer, layer_cache, hidden_TH);
    feed_forward(pool, num_tokens, layer, hidden_TH);
    keys += 2 * cache.bytes_per_half_layer;
  }
}

void Decoder::attend(ThreadPool& pool, const Batch& batch, const DecoderLayer& layer,
                     const KVLayer& cache, float* hidden_TH) {
  const HeadShape& heads = shape_.heads;
  const int64_t num_tokens = batch.num_tokens;
  const int64_t query_size = heads.num_heads * heads.head_dim;
  const int64_t kv_size = heads.num_kv_heads * heads.head_dim;
  const int64_t qkv_stride = row_stride(query_size + 2 * kv_size);
  const int64_t attended_stride = row_stride(query_size);

  normalise(pool, layer.qkv.format, num_tokens, layer.input_norm_H, hidden_TH);
  linear(pool, layer.qkv, rows_, layer.qkv_bias_O, qkv_TO_.data(), qkv_stride, false);

  pool.for_each(num_tokens, [&](int64_t token, int) {
    float* q_ND = qkv_TO_.data() + token * qkv_stride;
    float* k_KD = q_ND + query_size;
    if (layer.q_norm_D != nullptr) {
      for (float* head = q_ND; head < k_KD; head += heads.head_dim) {
        rms_norm_row(head, layer.q_norm_D, heads.head_dim, shape_.rms_norm_eps, head);
      }
      for (float* head = k_KD; head < k_KD + kv_size; head += heads.head_dim) {
        rms_norm_row(head, layer.k_norm_D, heads.head_dim, shape_.rms_norm_eps, head);
      }
    }
    rotary_cache_write_row(q_ND, k_KD, k_KD + kv_size,
                           cos_sin_PD_ + batch.positions_T[token] * heads.head_dim,
                           batch.slot_mapping_T[token], heads, cache);
  });
  paged_attention(pool, batch, heads, cache, shape_.attention_scale, layer.sliding_window,
                  qkv_TO_.data(), qkv_stride, attended_TO_.data(), attended_stride);

  rows_.resize(layer.output.format, num_tokens, query_size);
  pool.for_each(num_tokens, [&](int64_t token, int) {
    rows_.set_row(token, attended_TO_.data() + token * attended_stride);
  });
  linear(pool, layer.output, rows_, layer.output_bias_H, hidden_TH, shape_.hidden_size, true);
}

void Decoder::feed_forward(ThreadPool& pool, int64_t num_tokens, const DecoderLayer& layer,
                           float* hidden_TH) {
  normalise(pool, layer.gate_up.format, num_tokens, layer.post_attention_norm_H, hidden_TH);
  if (halves_are_whole_tiles(layer.gate_up)) {
    const int64_t stride = row_stride(shape_.inner_size);
    linear_silu_mul(pool, layer.gate_up, rows_, layer.gate_up_bias_G, gate_up_TG_.data(), stride);
    rows_.resize(layer.down.format, num_tokens, shape_.inner_size);
    pool.for_each(num_tokens, [&](int64_t token, int) {
      rows_.set_row(token, gate_up_TG_.data() + token * stride);
    });
  } else {
    const int64_t stride = row_stride(2 * shape_.inner_size);
    linear(pool, layer.gate_up, rows_, layer.gate_up_bias_G, gate_up_TG_.data(), stride, false);
    rows_.resize(layer.down.format, num_tokens, shape_.inner_size);
    pool.for_each(num_tokens, [&](int64_t token, int thread) {
      float* inner_F = scratch_of(thread);
      silu_mul_row(gate_up_TG_.data() + token * stride, shape_.inner_size, inner_F);
      rows_.set_row(token, inner_F);
    });
  }
  linear(pool, layer.down, rows_, layer.down_bias_H, hidden_TH, shape_.hidden_size, true);
}

void Decoder::normalise(ThreadPool& pool, Format format, int64_t num_tokens, const float* norm_H,
                        const float* hidden_TH) {
  rows_.resize(format, num_tokens, shape_.hidden_size);
  pool.for_each(num_tokens, [&](int64_t token, int thread) {
    float* normed_H = scratch_of(thread);
    rms_norm_row(hidden_TH + token * shape_.hidden_size, norm_H, shape_.hidden_size,
                 shape_.rms_norm_eps, normed_H);
    rows_.set_row(token, normed_H);
  });
}

}  // namespace firsttoken

extern "C" {

using firsttoken::Decoder;

Decoder* ft_decoder_new(const firsttoken::DecoderShape* shape, const float* cos_sin_PD) {
  return new Decoder(*shape, cos_sin_PD);
}

void ft_decoder_add_layer(Decoder* decoder, const firsttoken::DecoderLayer* layer) {
  decoder->add_layer(*layer);
}

void ft_decoder_forward(Decoder* decoder, const firsttoken::Batch* batch,
                        const firsttoken::KVCache* cache, float* hidden_TH) {
  firsttoken::PoolLease lease;
  decoder->forward(*lease, *batch, *cache, hidden_TH);
}

void ft_decoder_free(Decoder* decoder) { delete decoder; }
}
