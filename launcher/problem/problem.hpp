// One attention problem on a world of ranks: whole sequences by their sources, this rank's share of
// them in device memory, the layer, and the rows of the answer that this rank gets.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/problem/inputs.hpp"
#include "longspan/longspan.hpp"
#include "longspan/storage.hpp"

namespace longspan::launcher {

/// How a sequence is cut, seen from any rank.
struct Cut {
  Layout layout = Layout::contiguous;
  std::int64_t block = kSegment;                  // for interleaved
  std::vector<std::int64_t> ranges;               // for ranges: [ranks + 1]
  std::vector<std::vector<std::int64_t>> listed;  // for listed: positions on each rank

  Sharding rule() const { return {layout, block}; }
  /// The share of a rank; its table, if any, is this cut's own (in host memory).
  Shard on(int rank, int ranks, std::int64_t length) const;
};

/// The layout of keys in memory; without pages they follow each other.
struct CacheLayout {
  int page = 0;           // keys in a page; 0: no pages
  bool x_packed = false;  // as in attention.hpp

  explicit operator bool() const { return page > 0; }
};

struct Problem {
  Options options;  // limits come from the lengths, keys and queries from the cuts
  std::vector<std::int32_t> q_lens{1}, kv_lens{1};  // of each sequence
  Source q;                                         // [sum of q_lens, heads, head_dim]
  Source k, v;                     // [sum of kv_lens, kv_heads, head_dim or value_dim]
  std::optional<Source> stored_k;  // the bytes of keys whose rows carry their scales; k and v are
                                   // then their numbers (latent_rows.hpp)
  Source dout;                     // gradient of the result, like it, where options.gradients
  std::optional<Source> dlse;      // gradient of lse: [sum of q_lens, heads, 1] fp32
  bool fp32_gradients = false;     // fp32, not the types of q, k and v
  std::vector<float> sinks;        // [heads], or none
  std::vector<float> slopes;       // [heads] or [batch, heads] ALiBi, or none
  std::vector<float> qq_bias;      // [qq_width, qq_width], or none
  std::int64_t qq_width = 0;
  std::vector<std::uint8_t> causal;             // of each sequence, in place of the mask's; or none
  std::vector<std::int64_t> documents;          // [batch, count + 1] starts and end; or none
  std::vector<std::int64_t> bidirectional;      // [batch, count, 2] ranges; or none
  std::vector<std::int32_t> prefix;             // of each sequence, in place of the mask's; or none
  std::vector<std::int32_t> left_padding;       // of each sequence; or none
  std::vector<std::int32_t> indices;            // [tokens, lists, columns] of options.indices
  int lists = 1;                                // of a row: 1, or one for each kv head
  std::vector<std::int32_t> index_len;          // [tokens], or none
  std::array<std::int64_t, 2> dropout_seed{};   // seed and offset, where options.dropout
  std::vector<std::int32_t> dropout_sequences;  // numbers of the sequences there; or none
  std::vector<float> q_scale, k_scale, v_scale;  // [1], [kv_heads] or [batch, kv_heads],
                                                 // where sources are fp8
  float out_scale = 0;                           // out = result / out_scale; 0: none
  CacheLayout cache;
  Cut keys;
  std::optional<Cut> queries;  // where queries are sharded
  std::int64_t capacity = 0;   // > 0: k and v are [batch, capacity], NaN after each sequence

  /// The keys as they lie in memory.
  const Source& keys_in_memory() const { return stored_k ? *stored_k : k; }
  int batch() const { return static_cast<int>(q_lens.size()); }
  bool slopes_of_sequences() const {
    return slopes.size() > static_cast<std::size_t>(options.heads);
  }
  RunSize run_size(int ranks) const;
  /// Whether every rank's keys are sent in place (Limits::dense_keys): those of one sequence,
  /// without pages or room after it, with lengths that the host knows on a GPU as well.
  bool keys_lie_dense() const;
  /// The options of a layer that runs this on that many ranks.
  Options layer_options(int ranks) const;
  std::int64_t tokens() const;
  /// The first row of each sequence and, last, their sum.
  std::vector<std::int32_t> query_start() const;
  std::vector<std::int64_t> key_start() const;
  double scale() const;
  int value_dim() const { return options.of_values(); }
  DType out_dtype() const { return options.dtypes.of_out(); }
  bool goes_back() const { return options.gradients; }
  DType gradient_dtype() const { return fp32_gradients ? DType::fp32 : q.dtype; }
  std::size_t out_row_bytes() const {
    return static_cast<std::size_t>(options.heads * storage_of(out_dtype()).row_bytes(value_dim()));
  }
  int index_columns() const {
    return static_cast<int>(std::ssize(indices) / std::max<std::int64_t>(1, tokens() * lists));
  }
  /// The mask of sequence b.
  Mask mask(int b) const;
  /// An interval that holds the keys which a row sees. Of those in it, `bias` hides some.
  Interval visible(int b, std::int64_t position) const;
  /// The position of row t of sequence b.
  std::int64_t position(int b, std::int64_t t) const;
  /// How often the indices of row t of sequence b name each of its keys, [kv_len].
  std::vector<std::int64_t> named(int b, std::int64_t t, int head) const;
  /// The numbers that are added to the scores of row t of sequence b: [kv_len]; empty for none. A
  /// key that stands n times has ln(n) more, and one that is not named -inf.
  std::vector<double> bias(int b, std::int64_t t, int head) const;
  /// The factors of dropout for row t of sequence b: [kv_len]; empty for none.
  std::vector<double> dropout(int b, std::int64_t t, int head) const;
  /// The number of (row, key) pairs that the mask allows, each with 2 heads (head_dim + value_dim)
  /// floating- point operations.
  double visible_pairs() const;
};

/// The bytes of one row of the result, or of one key's gradients, in an Answer.
struct RowBytes {
  std::size_t out, lse, dq, dk, dv;
  explicit RowBytes(const Problem& p)
      : out(p.out_row_bytes()),
        lse(sizeof(float) * p.q.heads),
        dq(size_of(p.gradient_dtype()) * p.q.row_size()),
        dk(size_of(p.gradient_dtype()) * p.k.row_size()),
        dv(size_of(p.gradient_dtype()) * p.v.row_size()) {}
};

/// The part of the answer that this rank got.
struct Answer {
  std::vector<std::int64_t> rows;  // of the whole q
  std::vector<std::byte> out;      // [rows, heads, value_dim] in the problem's out dtype
  std::vector<float> lse;          // [rows, heads]

  // With a backward, in the problem's gradient dtype:
  std::vector<std::byte> dq;       // [rows, heads, head_dim]
  std::vector<std::int64_t> keys;  // of the whole k
  std::vector<std::byte> dk, dv;   // [keys, kv_heads, head_dim or value_dim]
  std::vector<float> dsinks;       // [heads], where there are sinks
};

/// A problem that is ready to run. Its constructor is collective.
class Trial {
 public:
  Trial(const Communicator& world, const Problem& problem)
      : Trial(world, problem, problem.options.strategy) {}
  /// With another strategy than that of the problem.
  Trial(const Communicator& world, const Problem& problem, const std::string& strategy);

  /// Runs once, with its backward where the problem has one, and waits. Outputs are NaN before the
  /// first run.
  void run();
  /// Runs once without the backward, and waits.
  void forward();
  /// Does the backward of the last run, and waits.
  void backward();
  bool goes_back() const { return problem_.goes_back(); }
  /// Queues a run.
  void queue(Stream stream) { layer_->run(args_, stream); }
  /// Makes the outputs NaN again.
  void poison();
  /// Makes the layer anew with another strategy; the arrays stay, and outputs are NaN again.
  /// Collective. Where the strategy refuses (Unsupported) there is no layer until the next call.
  void take_strategy(const std::string& name);
  Attention& layer() { return *layer_; }
  Answer answer() const;

 private:
  Options layer_options(const std::string& strategy) const;
  void take_features();
  void take_gradients();
  Buffer keys_in_place(const Source& source) const;
  Buffer pages(const Source& source, bool values) const;
  Tensor page_view(void* data, bool values) const;

  const Problem& problem_;
  Communicator world_;
  Shard shard_;                     // of the keys; its table is in host memory
  std::vector<std::int64_t> rows_;  // this rank's rows of the whole q
  std::optional<Attention> layer_;
  Buffer q_, k_, v_, out_, lse_, sinks_, query_start_, kv_len_, key_table_, slopes_, qq_bias_,
      causal_, documents_, bidirectional_, prefix_, left_padding_, indices_, index_len_, q_scale_,
      k_scale_, v_scale_, out_scale_, block_table_, dropout_seed_, dropout_sequences_;
  std::vector<std::int32_t> table_;  // the pages of each sequence: [batch, columns_]
  std::int64_t columns_ = 0, pages_ = 0;
  AttentionArgs args_;
  Buffer dout_, dlse_, dq_, dk_, dv_, dsinks_;  // where the problem goes back
  GradientArgs back_;
};

/// Gathers the given rows of the whole q, and gradients of the given keys of the whole k, on every
/// rank, from any rank. Both ascend. Collective.
Answer gather_rows(const Communicator& world, const Problem& problem, const Answer& answer,
                   const std::vector<std::int64_t>& rows,
                   const std::vector<std::int64_t>& keys = {});

/// A digest of 64 bits of every bit of the whole output, gradients included, independent of how it
/// is spread over ranks. Collective; throws a SharedError (wrong_result) where ranks hold different
/// copies.
std::uint64_t digest(const Communicator& world, const Problem& problem, const Answer& answer);

}  // namespace longspan::launcher
