// A random attention of all ranks: its inputs, the layouts of keys and queries, and the form of the
// cache, drawn from a seed that all ranks share. And the run of one rank by one strategy, whose
// rows are gathered on every rank.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "comm/control/wire.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/node_sizes.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {

/// How a rank holds its keys.
enum class Form { dense, gaps, capacity, rows, x_packed };
constexpr const char* kFormNames[] = {"dense", "gaps", "capacity", "rows", "x-packed"};

/// Positions dealt out by a rule, with the tables of all ranks.
struct Dealt {
  Sharding rule;
  std::vector<std::int64_t> ranges;               // [batch, ranks + 1]
  std::vector<std::vector<std::int64_t>> listed;  // [ranks] positions of each

  Shard of(int rank, int ranks, std::int64_t length) const {
    if (rule.layout == Layout::listed)
      return rule.resolve(length, rank, ranks, listed[rank].data(), std::ssize(listed[rank]));
    return rule.resolve(length, rank, ranks, ranges.empty() ? nullptr : ranges.data());
  }
};

struct StrategyCase {
  HostShape shape;
  Form form = Form::dense;
  Dealt keys;
  std::optional<Dealt> queries;
  bool sinks = false;
  bool grows = false;      // the keys of the query rows come as new ones
  int ranks_per_node = 0;  // of strategies of two levels; 0: the ranks have one node

  std::string text() const {
    std::ostringstream s;
    s << "heads " << shape.heads << "/" << shape.kv_heads << " dim " << shape.dim << " "
      << name(shape.dtype) << (shape.kv_dtype ? " fp8" : "") << " " << kFormNames[int(form)]
      << " keys " << name(keys.rule.layout) << ":" << keys.rule.block << " queries "
      << (queries ? name(queries->rule.layout) : "all") << " causal " << shape.mask.causal
      << " window " << shape.mask.window << "," << shape.mask.right << " "
      << name(shape.mask.alignment) << " softcap " << shape.softcap << (shape.alibi ? " alibi" : "")
      << (shape.qq ? " qq" : "") << (sinks ? " sinks" : "")
      << (shape.documents.empty() ? "" : " documents") << (shape.causal.empty() ? "" : " flags")
      << " chunk " << shape.mask.chunk << "," << shape.mask.lookback << " prefix "
      << shape.mask.prefix << (shape.bidirectional.empty() ? "" : " ranges")
      << (shape.left_padding.empty() ? "" : " padding")
      << (shape.used_rows.empty() ? "" : " used rows") << (grows ? " grows" : "") << " rope "
      << shape.rope.dim << (shape.rope.interleaved ? "i" : "")
      << (shape.rope_table ? " by tables" : "") << " nodes of " << ranks_per_node << " q";
    for (auto n : shape.query_len) s << " " << n;
    s << " kv";
    for (auto n : shape.kv_len) s << " " << n;
    return s.str();
  }
};

/// Draws cases. All ranks draw the same ones.
class Draw {
 public:
  explicit Draw(std::uint64_t seed, int ranks) : random_(seed), ranks_(ranks) {}

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }
  bool one_in(int n) { return below(n) == 0; }
  template <class T>
  T any(std::initializer_list<T> of) {
    return *(of.begin() + below(std::ssize(of)));
  }

  Dealt deal(Layout layout, std::int64_t block, const std::vector<std::int32_t>& lengths) {
    Dealt dealt{{layout, block}, {}, {}};
    if (layout == Layout::ranges)
      for (const std::int64_t length : lengths) {
        std::vector<std::int64_t> cuts{0, length};
        for (int r = 1; r < ranks_; ++r) cuts.push_back(below(length + 1));
        std::sort(cuts.begin(), cuts.end());
        dealt.ranges.insert(dealt.ranges.end(), cuts.begin(), cuts.end());
      }
    if (layout == Layout::listed) {
      dealt.listed.resize(static_cast<std::size_t>(ranks_));
      std::vector<std::int64_t> all(static_cast<std::size_t>(lengths[0]));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random_);
      for (const std::int64_t position : all)
        dealt.listed[static_cast<std::size_t>(below(ranks_))].push_back(position);
    }
    return dealt;
  }

  /// A case whose keys and rows have these layouts; without arguments, everything is drawn.
  StrategyCase next() {
    StrategyCase c;
    HostShape& s = c.shape;
    s.kv_heads = any({1, 2, 3});
    s.heads = s.kv_heads * any({1, 2, 4});
    s.dim = any({8, 16, 24, 64, 1, 15, 21, 59});
    s.dtype = any({DType::fp32, DType::fp32, DType::fp16, DType::bf16});
    const bool packed = one_in(2);  // documents
    const int batch = packed || one_in(2) ? 1 : 2 + static_cast<int>(below(3));
    s.query_len.clear();
    s.kv_len.clear();
    for (int b = 0; b < batch; ++b) {
      const auto keys = static_cast<std::int32_t>(one_in(8)   ? below(3)
                                                  : one_in(3) ? below(200)
                                                              : 128 + below(600));
      s.kv_len.push_back(keys);
      s.query_len.push_back(static_cast<std::int32_t>(one_in(8)   ? 0
                                                      : one_in(4) ? 1
                                                      : one_in(6)
                                                          ? keys + 3
                                                          : below(keys + 1) / any({1, 4, 16})));
      s.query_len.back() = std::min(s.query_len.back(), 150);
    }
    s.mask.causal = one_in(2);
    if (one_in(3)) s.mask.window = 1 + below(300);
    if (one_in(4)) s.mask.right = below(50);
    if (one_in(4)) s.mask.alignment = Alignment::upper_left;
    if (one_in(4)) s.softcap = 5.0f;
    if (one_in(4)) s.alibi = any({Alibi::context, Alibi::query, Alibi::sqrt});
    s.slopes_of_sequences = s.alibi && one_in(2);
    s.qq = one_in(5);
    c.sinks = one_in(3);
    if (batch > 1 && one_in(3))
      for (int b = 0; b < batch; ++b) s.causal.push_back(static_cast<std::uint8_t>(below(2)));
    if (one_in(packed ? 2 : 4))
      for (const std::int64_t length : s.kv_len) {
        std::vector<std::int64_t> cuts{std::min(length, below(3)),
                                       std::max<std::int64_t>(0, length - below(2))};
        for (int i = 0; i < 4; ++i) cuts.push_back(below(length + 1));
        std::sort(cuts.begin(), cuts.end());
        if (one_in(3)) cuts[4] = cuts[5];  // fewer documents
        s.documents.insert(s.documents.end(), cuts.begin(), cuts.end());
      }
    Draw(*this).draw_mask(s);  // of its own numbers
    if (one_in(4))
      for (const std::int64_t length : s.kv_len)
        s.left_padding.push_back(
            static_cast<std::int32_t>(below(one_in(3) ? length + 1 : length / 2 + 1)));
    if (one_in(4))
      for (const std::int64_t length : s.query_len)
        s.used_rows.push_back(static_cast<std::int32_t>(one_in(3) ? below(length + 1) : length));
    c.form =
        any({Form::dense, Form::dense, Form::gaps, Form::capacity, Form::rows, Form::x_packed});
    if (c.form == Form::rows) s.store = Store::rows;
    if (c.form == Form::x_packed) s.store = Store::x_packed;
    if (c.form == Form::rows || c.form == Form::x_packed) s.page = any({1, 8, 16, 48});
    if (one_in(5)) {
      s.kv_dtype = any({DType::e4m3, DType::e5m2});
      s.q_dtype = s.kv_dtype;
      s.scales = true;
      s.scales_per_head = one_in(2);
      s.scales_of_sequences = one_in(2);
    }
    deal_out(c);
    if (c.keys.rule.layout == Layout::listed && s.page > 0) {  // all of their pages are needed
      c.form = Form::gaps;
      s.page = 0;
    }
    const bool all_new_rows_are_seen = s.causal.empty() && s.documents.empty() &&
                                       s.left_padding.empty() &&
                                       s.mask.causal;  // in pages; others have memory
    bool fits = !s.kv_dtype && s.used_rows.empty() && c.keys.rule.layout != Layout::listed &&
                s.mask.alignment == Alignment::lower_right;
    for (int b = 0; b < batch; ++b) fits = fits && s.query_len[b] <= s.kv_len[b];
    c.grows = fits && (s.page == 0 || all_new_rows_are_seen) && one_in(2);
    c.ranks_per_node = draw_ranks_per_node();
    if (one_in(3) && s.dim > 1) draw_rope(s);
    return c;
  }

  /// Chunks, a prefix and bidirectional ranges.
  void draw_mask(HostShape& s) {
    random_.discard(99);
    if (one_in(4)) s.mask.chunk = 1 + below(300);
    if (s.mask.chunk > 0) s.mask.lookback = below(3);
    if (s.documents.empty() && one_in(4)) {
      s.mask.prefix = 1 + below(200);
      if (one_in(2))
        for (std::size_t b = 0; b < s.kv_len.size(); ++b)
          s.prefix.push_back(static_cast<std::int32_t>(below(s.mask.prefix + 1)));
    }
    if (one_in(4)) {
      s.mask.clamp_ranges = one_in(2);
      for (const std::int64_t length : s.kv_len) {
        std::vector<std::int64_t> bounds;
        for (int i = 0; i < 6; ++i) bounds.push_back(below(length + 1));
        std::sort(bounds.begin(), bounds.end());
        s.bidirectional.insert(s.bidirectional.end(), bounds.begin(), bounds.end());
      }
    }
  }

  void draw_rope(HostShape& s) {
    s.q_dtype.reset();
    s.rope = {.dim = 2 * (1 + static_cast<int>(below(s.dim / 2))), .interleaved = one_in(2)};
    if (one_in(2)) s.rope.base = 500.0f;
    if (one_in(3)) s.rope.scale = 2.5f;
    if (one_in(2)) s.rope_table = any({DType::fp32, DType::fp16, DType::bf16});
  }

  std::mt19937_64& random() { return random_; }

  /// For several nodes of several ranks, if the ranks allow that; else 0.
  int draw_ranks_per_node() {
    const std::vector<int> some = node_sizes(ranks_);
    return some.empty() ? 0 : some[static_cast<std::size_t>(below(std::ssize(some)))];
  }

 private:
  void deal_out(StrategyCase& c) {
    const HostShape& s = c.shape;
    const bool one = s.kv_len.size() == 1;
    const auto layout = [&](bool ranges, bool listed) {
      const Layout rule =
          any({Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved,
               Layout::interleaved, Layout::ranges, Layout::listed});
      return (rule == Layout::ranges && !ranges) || (rule == Layout::listed && !listed)
                 ? Layout::zigzag
                 : rule;
    };
    c.keys = deal(layout(true, one), any({16, 128}), s.kv_len);
    if (!one_in(3)) c.queries = deal(layout(one, false), any({3, 16}), s.query_len);
  }

  std::mt19937_64 random_;
  int ranks_;
};

/// The arrays of a run on its kernels' device: unchanged on CPUs, otherwise as copies.
class RunArraysOn {
 public:
  RunArraysOn(AttentionArgs& args, Device device) : device_(device) {
    if (device == Device::host) return;
    for (Tensor* tensor : {&args.q,
                           &args.k,
                           &args.v,
                           &args.query_start,
                           &args.kv_len,
                           &args.block_table,
                           &args.key_table,
                           &args.query_table,
                           &args.new_k,
                           &args.new_v,
                           &args.q_scale,
                           &args.k_scale,
                           &args.v_scale,
                           &args.sinks,
                           &args.slopes,
                           &args.qq_bias,
                           &args.causal,
                           &args.documents,
                           &args.bidirectional,
                           &args.prefix_len,
                           &args.left_padding,
                           &args.query_len,
                           &args.rope_cos,
                           &args.rope_sin})
      copy(*tensor);
    out_ = copy(args.out);
    lse_ = copy(args.lse.tensor);
  }

  /// Copies the results back to their places.
  void take_results() {
    for (const Copy* copy : {&out_, &lse_})
      if (copy->memory) copy->memory->download(copy->host);
  }

 private:
  struct Copy {
    void* host = nullptr;
    Buffer* memory = nullptr;
  };

  /// All from the first element to the last, with the gaps between them.
  Copy copy(Tensor& tensor) {
    if (!tensor || tensor.size() == 0) {
      tensor.device = device_;
      return {};
    }
    std::int64_t last = 0;
    for (int d = 0; d < tensor.dims; ++d) last += (tensor.shape[d] - 1) * tensor.stride[d];
    const std::size_t bytes = static_cast<std::size_t>(last + 1) * size_of(tensor.dtype);
    memory_.push_back(std::make_unique<Buffer>(device_, bytes));
    const Copy made{tensor.data, memory_.back().get()};
    made.memory->upload(made.host);
    tensor.data = made.memory->data();
    tensor.device = device_;
    return made;
  }

  Device device_;
  std::vector<std::unique_ptr<Buffer>> memory_;
  Copy out_, lse_;
};

/// One rank's run of a case, and its memory.
class CaseRun {
 public:
  CaseRun(const Communicator& world, const StrategyCase& c, HostProblem& problem)
      : world_(world), case_(c), problem_(problem), rank_(world.rank()), ranks_(world.size()) {
    lay_queries();
    lay_keys();
    const HostShape& s = case_.shape;
    if (case_.sinks)
      for (int h = 0; h < s.heads; ++h) sinks.push_back(0.3f * static_cast<float>(h) - 0.5f);
  }

  Options options(const std::string& strategy) const {
    const HostShape& s = case_.shape;
    Options o{.heads = s.heads,
              .kv_heads = s.kv_heads,
              .head_dim = s.dim,
              .dtypes = {.compute = s.dtype, .query = s.q_dtype, .kv = s.kv_dtype},
              .mask = s.mask,
              .score = {.softcap = s.softcap},
              .rope = s.rope,
              .keys = case_.keys.rule,
              .strategy = strategy,
              .ranks_per_node = case_.ranks_per_node,
              .threads = 1,
              .debug = {.profile = true}};  // of any number of phases
    if (s.alibi) o.score.alibi = *s.alibi;
    if (case_.queries) o.queries = case_.queries->rule;
    o.limits.max_batch = problem_.batch();
    o.limits.max_tokens = std::max<std::int64_t>(1, most_rows_);
    o.limits.max_kv_len =
        std::max<std::int64_t>(1, *std::max_element(s.kv_len.begin(), s.kv_len.end()));
    const std::int64_t all = std::accumulate(s.kv_len.begin(), s.kv_len.end(), std::int64_t{0});
    if (all % 2 == 1) o.limits.max_total_keys = all;  // in some cases
    return o;
  }

  /// Runs a fresh layer. The result is that of the rank's own rows, in fp32.
  Result run(const Options& options) {
    const HostShape& s = case_.shape;
    const std::int64_t heads = s.heads;
    Array out(s.dtype, rows_ * heads * s.dim);
    std::vector<float> lse(static_cast<std::size_t>(rows_ * heads), kNan);
    Attention layer(world_, options);
    AttentionArgs a = args();
    a.out = Tensor(out.data(), s.dtype, {rows_, heads, s.dim});
    a.lse = Lse::tokens_heads(Tensor(lse.data(), DType::fp32, {rows_, heads}));
    RunArraysOn arrays(a, world_.device());
    const std::uint64_t before = world_.received_bytes();
    layer.run(a);
    layer.wait();
    arrays.take_results();
    received = world_.received_bytes() - before;
    Result result{{}, std::move(lse)};
    for (std::int64_t i = 0; i < rows_ * heads * s.dim; ++i)
      result.out.push_back(static_cast<float>(out[i]));
    return result;
  }

  /// The rows of all ranks in the order of the whole q; for queries that every rank has, those of
  /// rank 0. Every row must come from one rank.
  Result whole(const Result& own) const {
    const std::int64_t heads = case_.shape.heads, row = heads * case_.shape.dim;
    const auto bytes = [](const std::vector<float>& values) {
      return std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4);
    };
    const auto outs = world_.gather(bytes(own.out), "rows"),
               lses = world_.gather(bytes(own.lse), "lse");
    Result all{std::vector<float>(static_cast<std::size_t>(problem_.tokens() * row), kNan),
               std::vector<float>(static_cast<std::size_t>(problem_.tokens() * heads), kNan)};
    for (int p = 0; p < (case_.queries ? ranks_ : 1); ++p) {
      const std::vector<std::int64_t> tokens = rows_of(p);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto at = static_cast<std::size_t>(tokens[i]);
        std::memcpy(all.out.data() + at * row, outs[p].data() + i * row * 4, row * 4);
        std::memcpy(all.lse.data() + at * heads, lses[p].data() + i * heads * 4, heads * 4);
      }
    }
    return all;
  }

  std::vector<float> sinks;
  std::uint64_t received = 0;  // bytes, of the last run

 private:
  /// The tokens of the whole q that rank p has.
  std::vector<std::int64_t> rows_of(int p) const {
    std::vector<std::int64_t> rows;
    for (int b = 0; b < problem_.batch(); ++b) {
      const std::int64_t length = case_.shape.query_len[b];
      const Shard shard = case_.queries ? case_.queries->of(p, ranks_, length) : Shard{};
      for (std::int64_t t = 0; t < shard.local_len(length); ++t)
        rows.push_back(problem_.query_start[b] + shard.position(t, length));
    }
    return rows;
  }

  void lay_queries() {
    const HostShape& s = case_.shape;
    const std::vector<std::int64_t> tokens = rows_of(rank_);
    rows_ = std::ssize(tokens);
    for (int p = 0; p < ranks_; ++p)
      most_rows_ = std::max<std::int64_t>(most_rows_, std::ssize(rows_of(p)));
    const std::int64_t row = std::int64_t{s.heads} * s.dim;
    const auto size = static_cast<std::int64_t>(size_of(problem_.q.dtype));
    q_ = Array(problem_.q.dtype, rows_ * row);
    for (std::int64_t i = 0; i < rows_; ++i)
      std::memcpy(q_.bytes.data() + i * row * size,
                  problem_.q.bytes.data() +
                      tokens[static_cast<std::size_t>(i)] * problem_.q_stride() * size,
                  static_cast<std::size_t>(row * size));
  }

  Shard key_shard() const { return case_.keys.of(rank_, ranks_, case_.shape.kv_len[0]); }

  void lay_keys() {
    const HostShape& s = case_.shape;
    const Shard shard = key_shard();
    if (s.page > 0) {
      local_ = problem_.local(shard);
      set_new_keys(shard);
      return;
    }
    // Rows of the form's pitch, from each sequence's first.
    const std::int64_t row = std::int64_t{s.kv_heads} * s.dim;
    pitch_ = case_.form == Form::gaps ? row + 8 : row;
    std::int64_t keys = 0;
    capacity_ = 0;
    for (int b = 0; b < problem_.batch(); ++b) {
      const std::int64_t own = shard.for_sequence(b).local_len(s.kv_len[b]);
      keys += own;
      capacity_ = std::max(capacity_, own + 2);
    }
    keys_ = case_.form == Form::capacity ? capacity_ * problem_.batch() : keys;
    local_.k = Array(problem_.k.dtype, keys_ * pitch_);
    local_.v = local_.k;
    const auto size = static_cast<std::int64_t>(size_of(problem_.k.dtype));
    std::int64_t packed = 0;
    for (int b = 0; b < problem_.batch(); ++b) {
      const Shard own = shard.for_sequence(b);
      std::int64_t at = case_.form == Form::capacity ? b * capacity_ : packed;
      for (std::int64_t i = 0; i < own.local_len(s.kv_len[b]); ++i, ++at, ++packed) {
        const std::int64_t position = own.position(i, s.kv_len[b]);
        if (case_.grows && position >= s.kv_len[b] - s.query_len[b]) continue;  // NaN until then
        const std::int64_t from = (problem_.key_start[b] + position) * problem_.kv_stride() * size;
        std::memcpy(local_.k.bytes.data() + at * pitch_ * size, problem_.k.bytes.data() + from,
                    static_cast<std::size_t>(row * size));
        std::memcpy(local_.v.bytes.data() + at * pitch_ * size, problem_.v.bytes.data() + from,
                    static_cast<std::size_t>(row * size));
      }
    }
    set_new_keys(shard);
  }

  /// The keys of the query rows, of all ranks; in pages, NaN in their places.
  void set_new_keys(const Shard& shard) {
    if (!case_.grows) return;
    const HostShape& s = case_.shape;
    const std::int64_t row = std::int64_t{s.kv_heads} * s.dim;
    const auto size = static_cast<std::int64_t>(size_of(problem_.k.dtype));
    new_k_ = Array(problem_.k.dtype, problem_.tokens() * row);
    new_v_ = new_k_;
    for (int b = 0; b < problem_.batch(); ++b)
      for (std::int64_t t = 0; t < s.query_len[b]; ++t) {
        const std::int64_t position = s.kv_len[b] - s.query_len[b] + t;
        const std::int64_t from = (problem_.key_start[b] + position) * problem_.kv_stride() * size,
                           to = (problem_.query_start[b] + t) * row * size;
        std::memcpy(new_k_.bytes.data() + to, problem_.new_k.bytes.data() + from,
                    static_cast<std::size_t>(row * size));
        std::memcpy(new_v_.bytes.data() + to, problem_.v.bytes.data() + from,
                    static_cast<std::size_t>(row * size));
        const Shard own = shard.for_sequence(b);
        if (s.page == 0 || !own.owns(position, s.kv_len[b])) continue;
        const std::int64_t key = own.before(position, s.kv_len[b]);
        const kernels::Pages& pages = local_.pages;
        const std::int64_t page = local_.table[static_cast<std::size_t>(
            b * pages.row_stride + key / pages.size * pages.column_stride)];
        for (int h = 0; h < s.kv_heads; ++h)
          for (int d = 0; d < s.dim; ++d)
            for (auto [rows, array] :
                 {std::pair{&local_.k_rows, &local_.k}, std::pair{&local_.v_rows, &local_.v}})
              array->set(page * rows->page_stride + key % pages.size * rows->row_stride +
                             h * rows->head_stride + rows->column(d),
                         kNan);
      }
  }

  Tensor strided(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                 std::initializer_list<std::int64_t> stride) const {
    Tensor t(data, dtype, shape);
    std::copy(stride.begin(), stride.end(), t.stride.begin());
    return t;
  }

  AttentionArgs args() {
    const HostShape& s = case_.shape;
    const std::int64_t kv = s.kv_heads, dim = s.dim, batch = problem_.batch();
    const DType type = problem_.k.dtype;
    AttentionArgs a;
    a.q = Tensor(q_.data(), q_.dtype, {rows_, s.heads, dim});
    const kernels::KvRows &kr = local_.k_rows, &vr = local_.v_rows;
    if (s.page > 0) {
      const kernels::Pages& p = local_.pages;
      if (s.store == Store::rows) {
        const auto page_rows = [&](Array& of, const kernels::KvRows& r) {
          return strided(of.data(), type, {p.count, p.size, kv, dim},
                         {r.page_stride, r.row_stride, r.head_stride, 1});
        };
        a.k = page_rows(local_.k, kr);
        a.v = page_rows(local_.v, vr);
      } else {
        a.k = strided(local_.k.data(), type, {p.count, kv, dim / kr.chunk, p.size, kr.chunk},
                      {kr.page_stride, kr.head_stride, kr.chunk_stride, kr.row_stride, 1});
        a.v = strided(local_.v.data(), type, {p.count, kv, dim, p.size},
                      {vr.page_stride, vr.head_stride, vr.dim_stride, 1});
      }
      a.block_table = Tensor(local_.table.data(), {batch, p.columns});
      a.block_table.stride = {p.row_stride, p.column_stride};
    } else {
      for (auto [to, of] : {std::pair{&a.k, &local_.k}, std::pair{&a.v, &local_.v}})
        *to = case_.form == Form::capacity
                  ? Tensor(of->data(), type, {batch, capacity_, kv, dim})
                  : strided(of->data(), type, {keys_, kv, dim}, {pitch_, dim, 1});
    }
    if (batch > 1) {
      a.query_start = Tensor(problem_.query_start.data(), {batch + 1});
      a.kv_len = Tensor(s.kv_len.data(), {batch});
    } else {
      a.total_keys = s.kv_len[0];
    }
    if (case_.queries) a.total_tokens = problem_.tokens();
    if (!case_.keys.ranges.empty())
      a.key_table = Tensor(case_.keys.ranges.data(), {batch, ranks_ + 1});
    if (case_.keys.rule.layout == Layout::listed && !case_.keys.listed[rank_].empty())
      a.key_table = Tensor(case_.keys.listed[rank_].data(), {std::ssize(case_.keys.listed[rank_])});
    if (case_.queries && !case_.queries->ranges.empty())
      a.query_table = Tensor(case_.queries->ranges.data(), {ranks_ + 1});
    if (s.scales) {
      const std::int64_t n = s.scales_per_head ? kv : 1;
      const auto scales = [&](const std::vector<float>& all) {
        return s.scales_of_sequences ? Tensor(all.data(), {problem_.batch(), kv})
                                     : Tensor(all.data(), {n});
      };
      a.q_scale = scales(problem_.q_scale);
      a.k_scale = scales(problem_.k_scale);
      a.v_scale = scales(problem_.v_scale);
    }
    if (case_.sinks) a.sinks = Tensor(sinks.data(), {s.heads});
    const DType of_slopes = problem_.slopes.dtype;
    if (s.alibi) a.slopes = Tensor(problem_.slopes.data(), of_slopes, {s.heads});
    if (s.alibi && s.slopes_of_sequences)
      a.slopes = Tensor(problem_.slopes.data(), of_slopes, {batch, s.heads});
    if (s.qq)
      a.qq_bias =
          strided(problem_.qq.data(), problem_.qq.dtype, {problem_.qq_width(), problem_.qq_width()},
                  {problem_.qq_width() + HostProblem::kGap, 1});
    if (!s.causal.empty()) a.causal = Tensor(s.causal.data(), {batch});
    if (!s.documents.empty())
      a.documents = Tensor(s.documents.data(), {batch, problem_.starts_of_one()});
    if (!s.bidirectional.empty())
      a.bidirectional = Tensor(s.bidirectional.data(), {batch, problem_.ranges_of_one(), 2});
    if (!s.prefix.empty()) a.prefix_len = Tensor(s.prefix.data(), {batch});
    if (!s.left_padding.empty()) a.left_padding = Tensor(s.left_padding.data(), {batch});
    if (!s.used_rows.empty()) a.query_len = Tensor(s.used_rows.data(), {batch});
    if (problem_.tables) {
      a.rope_cos = problem_.tables->view(problem_.tables->cos);
      a.rope_sin = problem_.tables->view(problem_.tables->sin);
    }
    if (case_.grows) {
      a.new_k = Tensor(new_k_.data(), type, {problem_.tokens(), kv, dim});
      a.new_v = Tensor(new_v_.data(), type, {problem_.tokens(), kv, dim});
    }
    return a;
  }

  Communicator world_;
  const StrategyCase& case_;
  HostProblem& problem_;
  int rank_, ranks_;
  std::int64_t rows_ = 0, most_rows_ = 0;  // of q on this rank, and at most on any
  Array q_, new_k_, new_v_;
  Local local_;
  std::int64_t keys_ = 0, capacity_ = 0, pitch_ = 0;  // of a contiguous cache
};

}  // namespace longspan::tests
