// The kernels of one device by the names that serving engines know, for one rank's part of a
// computation: merge of partial results, segmented decode and chunked prefill over a paged cache,
// and the cache's writer. A layer (attention.hpp) does the same across ranks.
//
//     Kernels kernels(Device::cuda);
//     kernels.merge_attn_states({.out = out, .prefix_out = a, .prefix_lse = Lse::heads_tokens(la),
//                                .suffix_out = b, .suffix_lse = Lse::heads_tokens(lb)},
//                               LogBase::e, stream);
//
// Every call checks its arguments (InputError, Unsupported; nothing is written then), queues on the
// stream and returns; on the host the work is done when it returns. Nothing is allocated: a call
// that needs memory takes a Workspace, and says how much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "longspan/element.hpp"
#include "longspan/kv_cache.hpp"
#include "longspan/mask.hpp"
#include "longspan/score.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// A log-sum-exp tensor, fp32. Both layouts are in use, and for square ones no check could tell
/// them apart, so it is said where the tensor is made.
struct Lse {
  Tensor tensor;  // viewed as [tokens, heads]; also [parts, tokens, heads]
  static Lse tokens_heads(Tensor t) { return {t}; }
  static Lse heads_tokens(Tensor t) {
    const int d = t.dims;
    if (d >= 2 && d <= Tensor::kMaxDims) {
      std::swap(t.shape[d - 2], t.shape[d - 1]);
      std::swap(t.stride[d - 2], t.stride[d - 1]);
    }
    return {t};
  }

  explicit operator bool() const { return static_cast<bool>(tensor); }
};

/// Memory of the caller on the device of the kernels, 256-byte aligned.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// out = the merge of the partial results over a prefix and a suffix of the keys. Each of the three
/// is of any type; an fp8 part stands for x * its scale, which it must have. Terms are fp32 and are
/// scaled before they are added, so that finite parts have a finite merge, with one rounding at the
/// end: fp16 and bf16 overflow to infinity there, fp8 saturates. InputError for shapes, devices and
/// strides that do not fit, a missing scale, and an `out` that overlaps itself or an input.
struct MergeAttnStates {
  Tensor out;         // [tokens, heads, dim]; may be prefix_out itself, and overlaps nothing else
  Lse out_lse = {};   // optional; may be prefix_lse itself
  Tensor prefix_out;  // [tokens, heads, dim]
  Lse prefix_lse;
  Tensor suffix_out;  // [tokens, heads, dim]
  Lse suffix_lse;
  std::optional<std::int64_t> prefill_tokens_with_context = {};  // tokens from here on copy the
                                                                 // suffix and its lse
  const float* out_scale = nullptr;     // [1], out = result / scale; fp8 needs it
  bool nan_is_empty = false;            // a NaN lse counts as empty; else it stays NaN
  const float* prefix_scale = nullptr;  // [1], a stored x stands for x * scale; fp8 needs it
  const float* suffix_scale = nullptr;  // likewise
};

/// out = the merge of any number of partial results, neighbours first. Types and errors as above.
struct MergeStates {
  Tensor out;        // [tokens, heads, dim]
  Lse out_lse = {};  // optional
  Tensor parts;      // [parts, tokens, heads, dim]
  Lse lses;          // [parts, tokens, heads], or [parts, heads, tokens]
  const float* out_scale = nullptr;
  bool nan_is_empty = false;
  const float* part_scales = nullptr;  // [parts], one for each part; fp8 needs it
};

/// What decode and prefill over a paged cache have in common. Meanings as in Request
/// (attention.hpp), for one rank that holds all keys.
struct PagedAttention {
  Tensor q;                 // [tokens, heads, head_dim]
  Tensor k_cache, v_cache;  // kv_cache.hpp
  BlockTable block_table;   // [batch, columns]
  int batch = 1;
  const std::int32_t* query_start = nullptr;  // [batch + 1]
  const std::int32_t* kv_len = nullptr;       // [batch], the new tokens included
  std::int64_t max_kv_len = 0;                // no sequence is longer; 0: what the table can hold
  std::int64_t max_query_len = 0;             // no sequence has more queries; 0: unknown

  Tensor out;                        // [tokens, heads, value_dim]
  Lse lse = {};                      // natural log; optional
  const float* out_scale = nullptr;  // [1]: out = result / scale; fp8 needs it
  DType dtype = DType::bf16;         // of the products; that of q, unless q is fp8

  std::optional<float> scale = {};  // default 1 / sqrt(head_dim)
  Mask mask = {.causal = true};
  const std::uint8_t* causal = nullptr;  // [batch] in place of mask.causal
  float softcap = 0.0f;
  Floats sinks = {};
  Floats slopes = {};
  Alibi alibi = Alibi::context;
  QqBias qq_bias = {};
  Scales q_scale = {}, k_scale = {}, v_scale = {};
  bool tf32 = false;
  Workspace workspace = {};
};

/// Per-segment states, fp32, natural units, o unnormalised.
struct Segments {
  Tensor output;          // [tokens, heads, segments, padded value_dim]
  Tensor max, expsum;     // [tokens, heads, segments]
  std::int64_t keys = 0;  // in a segment; segments * keys hold every sequence. 0: as serving
                          // engines cut, ceil(kv_len / (segments * tile)) tiles in each segment
  int tile = 16;
};

/// Decode and short queries over a paged cache. Without `segments` the keys are cut as fills the
/// GPU, in the fixed order. With them, their states are handed out (out may then be left out):
/// segment 0 holds the sink, and segments past the end of a sequence are not written.
struct SegmentedAttention : PagedAttention {
  Segments segments = {};
};

/// The states of segmented_attention -> out. Segments past a sequence's end are never read.
struct ReduceSegments {
  Segments segments;
  Tensor out;
  Lse lse = {};
  const float* out_scale = nullptr;
  int batch = 1;
  const std::int32_t* query_start = nullptr;
  const std::int32_t* kv_len = nullptr;
};

/// Chunked prefill: the first kv_len - q_len keys of a sequence lie in the cache, the last q_len
/// are new and lie as q does. k_scale and v_scale are of the cache.
struct ContextAttention : PagedAttention {
  Tensor k;                  // [tokens, kv_heads, head_dim], of `dtype`
  Tensor v;                  // [tokens, kv_heads, value_dim], of `dtype`
  bool skip_decode = false;  // sequences of one query are left out, their rows untouched
  const float* out_scale_inv = nullptr;  // [1]: out = result * scale_inv, in place of
                                         // out_scale
};

/// New keys and values into a paged cache, each where its slot says.
struct AppendKv {
  Tensor k;                             // [tokens, kv_heads, head_dim]
  Tensor v;                             // [tokens, kv_heads, value_dim]; left out where v_cache
                                        // is the first columns of k_cache
  Tensor k_cache, v_cache;              // kv_cache.hpp
  const std::int64_t* slots = nullptr;  // [tokens] page * page size + row; < 0: not written
  Scales k_scale = {}, v_scale = {};    // fp8 caches store x / scale
};

class Kernels {
 public:
  /// `threads`: on the host, at most; 0 takes LONGSPAN_THREADS, or else all cores. On CUDA: the
  /// current GPU. UsageError for a negative number.
  explicit Kernels(Device device, int threads = 0);
  ~Kernels();
  Kernels(Kernels&&) noexcept;
  Kernels& operator=(Kernels&&) noexcept;

  /// `base`: of every lse given and written. There is no default on purpose.
  void merge_attn_states(const MergeAttnStates& args, LogBase base, Stream stream = {}) const;
  void merge_states(const MergeStates& args, LogBase base, Stream stream = {}) const;

  void segmented_attention(const SegmentedAttention& args, Stream stream = {}) const;
  void reduce_segments(const ReduceSegments& args, Stream stream = {}) const;
  void context_attention(const ContextAttention& args, Stream stream = {}) const;
  void append_kv(const AppendKv& args, Stream stream = {}) const;

  /// Bytes of `workspace` that a call with these arguments takes. Lengths and pointers are not
  /// read: what holds for a shape holds for every call of it.
  std::size_t workspace_bytes(const SegmentedAttention& args) const;
  std::size_t workspace_bytes(const ContextAttention& args) const;

  /// Checks lengths, block table and slots where they lie, and that segments of a given size hold
  /// every sequence, and waits: InputError names the first fault. On the host every call does this
  /// by itself.
  void check(const PagedAttention& args, Stream stream = {}) const;
  void check(const SegmentedAttention& args, Stream stream = {}) const;
  void check(const ReduceSegments& args, Stream stream = {}) const;
  void check(const ContextAttention& args, Stream stream = {}) const;  // uses its workspace
  void check(const AppendKv& args, Stream stream = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longspan
