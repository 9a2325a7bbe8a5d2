// Times the serving kernels (kernels.hpp) on one device and prints a line of JSON for each case:
//
//     bench_serving                          on the GPU: copy, merge, decode, chunked
//     bench_serving --device host            the same on processors: bring patience, or --tiny
//     bench_serving --section layer          decode of the layer on contiguous keys, on the GPU
//     bench_serving --device host --section plain
//                                            paged attention beside the layer on contiguous keys
//
// Bytes count once each (merge: read and written; decode: keys and values only), operations of
// chunked prefill are 4 heads dim (new context + new^2 / 2) a sequence. A sample of every result is
// held against float64 ("right"); where one is wrong or a case throws ("error") the status is 5.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/data.hpp"
#include "bench/paged.hpp"
#include "bench/timing.hpp"
#include "longspan/longspan.hpp"

namespace longspan::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kBeyondCache = 240e6;  // bytes: four times an H200's L2
constexpr double kInCache = 60e6;
constexpr int kWrongResult = 5;

struct Settings {
  Device device = Device::cuda;
  bool tiny = false;
  int threads = 0;
  std::vector<std::string> sections;
  std::vector<std::size_t> rows;  // of the tables; none: all
  std::vector<PageLayout> layouts;
  std::vector<int> pages = {16};
  std::string kv_dtype = "bf16";
  int tokens = 1;  // new tokens of a sequence in decode
  std::int64_t window = 0;
  bool identity = false;

  bool takes(std::size_t row) const {
    return rows.empty() || std::find(rows.begin(), rows.end(), row) != rows.end();
  }
  DType cache_type() const { return kv_dtype == "e4m3" ? e4m3 : kv_dtype == "e5m2" ? e5m2 : bf16; }
};

bool all_right = true;

Effort effort(const Settings& s, int launches) {
  const bool host = s.device == Device::host;
  return {launches, s.tiny ? 3 : host ? 7 : 30, s.tiny ? 0.0 : 3e5};
}

void print(Json line, const Times& t, const Judge* judge, DType dtype) {
  line["us"] = t.median;
  line["min_us"] = t.least;
  line["spread"] = t.spread;
  line["count"] = t.count;
  if (judge != nullptr) {
    line["right"] = judge->right(dtype);
    line["relative_error"] = judge->relative();
    all_right = all_right && judge->right(dtype);
  }
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

/// One case; what it throws is one line and costs that case only.
template <class Case>
void attempt(const Json& about, const Case& one) {
  try {
    one();
  } catch (const std::exception& error) {
    Json line = about;
    line["error"] = error.what();
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
    all_right = false;
  }
}

double rate(double amount, const Times& t) { return amount / t.median / 1e6; }  // T / s

// ---- copy ---------------------------------------------------------------------------------------

void copy(const Settings& s) {
#ifdef LONGSPAN_HAVE_CUDA
  if (s.device != Device::cuda) return;
  const std::size_t bytes = std::size_t{1} << (s.tiny ? 20 : 31);
  const Buffer from(s.device, bytes), to(s.device, bytes);
  launcher::cuda_ok(cudaMemset(from.data(), 0x3c, bytes), "memset");
  const auto work = [&](int, Stream stream) {
    launcher::cuda_ok(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice,
                                      static_cast<cudaStream_t>(stream.handle)),
                      "copy");
  };
  const Times t = times(s.device, work, effort(s, 1));
  print({{"section", "copy"}, {"bytes", 2 * bytes}, {"tb_s", rate(2.0 * bytes, t)}}, t, nullptr,
        fp32);
#else
  (void)s;
#endif
}

// ---- merge --------------------------------------------------------------------------------------

struct MergeRow {
  std::int64_t tokens;
  int heads;
};
constexpr MergeRow kMerge[] = {{256, 16}, {1024, 32}, {4096, 32}, {16384, 64}};

/// A prefix and a suffix, and their merge: lse [heads, tokens], a tenth of the prefix empty.
struct MergeSet {
  static constexpr int kDim = 128;

  MergeSet(Device device, DType dtype, MergeRow row, std::uint64_t seed) {
    const auto [tokens, heads] = row;
    const auto lses = [&](std::uint64_t of, bool some_empty) {
      const Values values{of, fp32};
      std::vector<float> drawn(tokens * heads);
      for (std::size_t i = 0; i < drawn.size(); ++i)
        drawn[i] = some_empty && i % 10 == 3
                       ? std::numeric_limits<float>::infinity()
                       : 8.0f + 2.0f * values.exact(static_cast<std::int64_t>(i));
      return Numbers<float>(device, std::move(drawn));
    };
    for (int part = 0; part < 2; ++part) {
      in[part] = Array(device, {seed + part, dtype}, {tokens, heads, kDim});
      lse[part] = lses(seed + 2 + part, part == 0);
    }
    out = Array::nan(device, dtype, {tokens, heads, kDim});
    out_lse = Array::nan(device, fp32, {heads, tokens});
  }

  MergeAttnStates args() const {
    const auto lse_view = [&](const float* data) {
      Tensor t = out_lse.view;
      t.data = const_cast<float*>(data);
      return Lse::heads_tokens(t);
    };
    MergeAttnStates a;
    a.out = out.view;
    a.out_lse = Lse::heads_tokens(out_lse.view);
    a.prefix_out = in[0].view;
    a.prefix_lse = lse_view(lse[0].data());
    a.suffix_out = in[1].view;
    a.suffix_lse = lse_view(lse[1].data());
    return a;
  }

  Judge judge() const {
    const std::int64_t tokens = out.view.shape[0], heads = out.view.shape[1];
    const std::vector<std::byte> result = out.download();
    Judge found;
    for (std::int64_t row = 0; row < tokens * heads; row += 1 + tokens * heads / 4099) {
      const std::int64_t at = row % heads * tokens + row / heads;  // in the lse
      const double a = lse[0].host[at], b = lse[1].host[at];
      const double weight = std::isinf(a) ? 0 : 1 / (1 + std::exp(b - a));
      for (std::int64_t i = row * kDim; i < (row + 1) * kDim; ++i)
        found.compare(load_element(result.data(), out.view.dtype, i),
                      weight * in[0].values(i) + (1 - weight) * in[1].values(i));
    }
    return found;
  }

  Array in[2], out, out_lse;
  Numbers<float> lse[2];
};

void merge(const Settings& s, const Kernels& kernels, DType dtype, MergeRow row) {
  const double rows = static_cast<double>(row.tokens) * row.heads;
  const double bytes = 3 * rows * (MergeSet::kDim * size_of(dtype) + sizeof(float));
  // What fits in the cache is measured there, as a model's layer finds it.
  const bool in_cache = bytes < kInCache;
  const int count = in_cache || s.tiny ? 1 : static_cast<int>(std::ceil(kBeyondCache / bytes));
  std::vector<MergeSet> sets;
  for (int i = 0; i < count; ++i) sets.emplace_back(s.device, dtype, row, 10 * i + 40);
  const Times t = times(
      s.device,
      [&](int i, Stream stream) {
        kernels.merge_attn_states(sets[i % count].args(), LogBase::e, stream);
      },
      effort(s, (20 + count - 1) / count * count));
  const Judge judge = sets.back().judge();
  print({{"section", "merge"},
         {"dtype", name(dtype)},
         {"tokens", row.tokens},
         {"heads", row.heads},
         {"dim", MergeSet::kDim},
         {"in_cache", in_cache},
         {"bytes", bytes},
         {"tb_s", rate(bytes, t)}},
        t, &judge, dtype);
}

void merge(const Settings& s, const Kernels& kernels) {
  for (DType dtype : {bf16, fp32}) {
    for (std::size_t r = 0; r < std::size(kMerge); ++r) {
      MergeRow row = kMerge[r];
      if (s.tiny) row.tokens /= 64;
      if (s.takes(r))
        attempt({{"section", "merge"}, {"row", r}, {"dtype", name(dtype)}},
                [&] { merge(s, kernels, dtype, row); });
    }
  }
}

// ---- attention over a paged cache ---------------------------------------------------------------

struct DecodeRow {
  int heads, kv_heads, batch;
  std::int64_t kv_len;
};
constexpr DecodeRow kDecode[] = {{32, 8, 1, 131072}, {64, 8, 1, 131072}, {32, 8, 8, 32768},
                                 {64, 8, 8, 32768},  {32, 8, 32, 4096},  {8, 1, 16, 65536}};

void decode(const Settings& s, const Kernels& kernels, const DecodeRow& row, int page,
            PageLayout layout) {
  const std::int64_t kv_len = s.tiny ? row.kv_len / 512 + 3 : row.kv_len;
  const CacheShape shape{row.kv_heads, 128, s.cache_type(), page, layout, !s.identity};
  const Decode problem(s.device, kernels, {row.heads, row.kv_heads, row.batch, s.tokens, kv_len},
                       shape, s.window);
  const Times t = times(s.device, std::ref(problem), effort(s, 5));
  const std::int64_t read = s.window > 0 ? std::min(kv_len, s.window + s.tokens - 1) : kv_len;
  const double bytes = 2.0 * row.batch * static_cast<double>(read) * row.kv_heads * 128 *
                       static_cast<double>(size_of(shape.dtype));
  Json line = problem.describe("decode");
  line["bytes"] = bytes;
  line["tb_s"] = rate(bytes, t);
  const Judge judge = problem.judge();
  print(line, t, &judge, bf16);
}

// ---- decode of the layer ------------------------------------------------------------------------

/// kv_len 0: lengths spread evenly over 1 ... kMostRagged, in a random order.
constexpr DecodeRow kLayer[] = {{32, 8, 1, 131072}, {64, 8, 1, 131072}, {32, 8, 8, 32768},
                                {32, 8, 32, 4096},  {8, 1, 16, 65536},  {64, 8, 1, 524288},
                                {32, 8, 1, 1024},   {32, 8, 1, 8192},   {32, 8, 64, 0}};
constexpr std::int64_t kMostRagged = 32768;

/// One rank's layer over contiguous keys [batch, capacity]. What fits in the cache is one of
/// several copies in turn, so that every call reads from memory.
class LayerDecode {
 public:
  LayerDecode(const Settings& s, const DecodeRow& row)
      : heads_(row.heads), kv_heads_(row.kv_heads), batch_(row.batch), tokens_(s.tokens) {
    const std::int64_t most = s.tiny ? 700 : kMostRagged;
    for (int b = 0; b < batch_; ++b) {
      const std::int64_t place = (b * 37 + 11) % batch_;
      lens_.push_back(static_cast<std::int32_t>(
          row.kv_len > 0 ? (s.tiny ? row.kv_len / 512 + 3 : row.kv_len)
                         : std::max<std::int64_t>(1, most * (place + 1) / batch_)));
      keys_ += lens_.back();
    }
    capacity_ = *std::max_element(lens_.begin(), lens_.end());
    layer_.emplace(self(s.device), Options{.heads = heads_,
                                           .kv_heads = kv_heads_,
                                           .dim = kDim,
                                           .dtype = bf16,
                                           .mask = {.causal = true},
                                           .max_tokens = std::int64_t{batch_} * tokens_,
                                           .max_batch = batch_,
                                           .max_kv_len = capacity_,
                                           .max_query_len = tokens_,
                                           .threads = s.threads});
    const std::int64_t rows = std::int64_t{batch_} * tokens_;
    q_ = Array(s.device, {20, bf16}, {rows, heads_, kDim});
    out_ = Array::nan(s.device, bf16, {rows, heads_, kDim});
    const int copies =
        s.tiny || bytes() > kBeyondCache ? 1 : static_cast<int>(std::ceil(kBeyondCache / bytes()));
    for (int i = 0; i < copies; ++i) {
      k_.emplace_back(s.device, Values{seed(i), bf16},
                      std::initializer_list<std::int64_t>{batch_, capacity_, kv_heads_, kDim});
      v_.emplace_back(s.device, Values{seed(i) + 1, bf16},
                      std::initializer_list<std::int64_t>{batch_, capacity_, kv_heads_, kDim});
    }
    std::vector<std::int32_t> starts;
    for (int b = 0; b <= batch_; ++b) starts.push_back(b * tokens_);
    starts_on_ = Numbers<std::int32_t>(s.device, std::move(starts));
    lens_on_ = Numbers<std::int32_t>(s.device, std::vector<std::int32_t>(lens_));
  }

  int copies() const { return static_cast<int>(k_.size()); }
  double bytes() const { return 2.0 * static_cast<double>(keys_) * kv_heads_ * kDim * 2; }

  void operator()(int i, Stream stream) {
    Request request{.q = q_.view,
                    .k = k_[i % copies()].view,
                    .v = v_[i % copies()].view,
                    .shard = Shard::contiguous(capacity_, 0, 1),
                    .out = out_.view};
    if (batch_ > 1) {
      request.batch = batch_;
      request.query_start = starts_on_.data();
      request.kv_len = lens_on_.data();
    } else {  // keys of the one sequence have no dimension for it
      for (Tensor* t : {&request.k, &request.v})
        *t = Tensor(t->data, bf16, {capacity_, kv_heads_, kDim}, t->device);
    }
    layer_->run(request, stream);
  }

  /// Rows of the last call, the `launches` - 1st.
  Judge judge(int launches) const {
    const Values k{seed((launches - 1) % copies()), bf16}, v{k.seed + 1, bf16};
    const std::vector<std::byte> result = out_.download();
    Judge found;
    for (int b : {0, batch_ / 2, batch_ - 1})
      for (int head : {0, heads_ - 1}) {
        const std::int64_t row = std::int64_t{b} * tokens_ + tokens_ - 1;  // sees every key
        const int kv_head = head / (heads_ / kv_heads_);
        const auto at = [&](std::int64_t j) {
          return ((b * capacity_ + j) * kv_heads_ + kv_head) * kDim;
        };
        const std::vector<double> exact = attend_exactly(
            0, lens_[b], kDim,
            [&](std::int64_t j) {
              double product = 0;
              for (int d = 0; d < kDim; ++d)
                product += q_.values((row * heads_ + head) * kDim + d) * k(at(j) + d);
              return product / std::sqrt(static_cast<double>(kDim));
            },
            [&](std::int64_t j, int d) { return v(at(j) + d); });
        for (int d = 0; d < kDim; ++d)
          found.compare(load_element(result.data(), bf16, (row * heads_ + head) * kDim + d),
                        exact[d]);
      }
    return found;
  }

 private:
  static constexpr int kDim = 128;
  static std::uint64_t seed(int copy) { return 100 + 2 * static_cast<std::uint64_t>(copy); }

  int heads_, kv_heads_, batch_, tokens_;
  std::int64_t capacity_ = 0, keys_ = 0;
  std::vector<std::int32_t> lens_;
  std::optional<Attention> layer_;
  Array q_, out_;
  std::vector<Array> k_, v_;
  Numbers<std::int32_t> starts_on_, lens_on_;
};

void layer(const Settings& s, const DecodeRow& row) {
  LayerDecode problem(s, row);
  const int launches = (5 + problem.copies() - 1) / problem.copies() * problem.copies();
  const Times t = times(s.device, std::ref(problem), effort(s, launches));
  const Judge judge = problem.judge(launches);
  print({{"section", "layer"},
         {"heads", row.heads},
         {"kv_heads", row.kv_heads},
         {"dim", 128},
         {"dtype", "bf16"},
         {"batch", row.batch},
         {"tokens", s.tokens},
         {"kv_len", row.kv_len},
         {"bytes", problem.bytes()},
         {"tb_s", rate(problem.bytes(), t)}},
        t, &judge, bf16);
}

struct ChunkRow {
  std::int64_t q_len, context;
  int batch;
};
constexpr ChunkRow kChunk[] = {{512, 8192, 1},  {512, 32768, 1},  {512, 32768, 4},
                               {2048, 8192, 1}, {2048, 32768, 1}, {2048, 32768, 4}};

void chunked(const Settings& s, const Kernels& kernels, ChunkRow row, int page, PageLayout layout) {
  if (s.tiny) row = {row.q_len / 32 + 1, row.context / 128 + 5, row.batch};
  const CacheShape shape{8, 128, s.cache_type(), page, layout, !s.identity};
  const Chunk problem(s.device, kernels, {32, 8, row.batch, row.q_len, row.q_len + row.context},
                      shape);
  const Times t = times(s.device, std::ref(problem), effort(s, 1));
  Json line = problem.describe("chunked");
  line["operations"] = problem.operations();
  line["tflop_s"] = rate(problem.operations(), t);
  const Judge judge = problem.judge();
  print(line, t, &judge, bf16);
}

/// The rows of a table over every asked kind of cache.
template <class Row, std::size_t kRows, class Case>
void over_caches(const Settings& s, const char* section, const Row (&rows)[kRows],
                 const Case& one) {
  for (std::size_t r = 0; r < kRows; ++r)
    for (PageLayout layout : s.layouts)
      for (int page : s.pages)
        if (s.takes(r))
          attempt({{"section", section}, {"row", r}, {"page", page}, {"layout", name(layout)}},
                  [&] { one(rows[r], page, layout); });
}

// ---- beside the plain layer, on processors ------------------------------------------------------

/// The layer over the same number of contiguous keys of the product's type.
class Plain {
 public:
  Plain(const Settings& s, Sizes sizes)
      : size_(sizes),
        layer_(self(s.device), {.heads = sizes.heads,
                                .kv_heads = sizes.kv_heads,
                                .dim = sizes.dim,
                                .dtype = sizes.dtype,
                                .mask = {.causal = true},
                                .max_tokens = sizes.q_len,
                                .max_kv_len = sizes.kv_len,
                                .threads = s.threads}),
        q_(s.device, {20, sizes.dtype}, {sizes.q_len, sizes.heads, sizes.dim}),
        k_(s.device, {21, sizes.dtype}, {sizes.kv_len, sizes.kv_heads, sizes.dim}),
        v_(s.device, {22, sizes.dtype}, {sizes.kv_len, sizes.kv_heads, sizes.dim}),
        out_(Array::nan(s.device, sizes.dtype, {sizes.q_len, sizes.heads, sizes.dim})) {}

  void run() {
    layer_.run({.q = q_.view,
                .k = k_.view,
                .v = v_.view,
                .shard = Shard::contiguous(size_.kv_len, 0, 1),
                .out = out_.view});
    layer_.wait();
  }

 private:
  Sizes size_;
  Attention layer_;
  Array q_, k_, v_, out_;
};

/// The two sides in turns; the best of each, since other work on the machine only slows.
template <class Problem>
void beside_plain(const Settings& s, const Kernels& kernels, const char* section, Sizes size,
                  CacheShape shape, const char* what) {
  const Problem problem(s.device, kernels, size, shape);
  Plain plain(s, size);
  std::vector<double> ours, theirs;
  for (int i = 0; i < (s.tiny ? 3 : 12); ++i) {
    const double a = host_us([&] { problem(0, {}); });
    const double b = host_us([&] { plain.run(); });
    if (i == 0) continue;  // warms up
    ours.push_back(a);
    theirs.push_back(b);
  }
  const Times t = Times::of(ours), peer = Times::of(theirs);
  Json line = problem.describe(section);
  line["what"] = what;
  line["plain_us"] = peer.median;
  line["plain_min_us"] = peer.least;
  line["ratio"] = peer.least / t.least;
  const Judge judge = problem.judge();
  print(line, t, &judge, size.dtype);
}

void beside_plain(const Settings& s, const Kernels& kernels) {
  const std::int64_t part = s.tiny ? 64 : 1;
  for (DType dtype : {fp32, bf16}) {
    const Sizes one{32, 8, 1, 1, 32768 / part, 128, dtype};
    const Sizes chunk{8, 2, 1, std::max<std::int64_t>(512 / part, 2), 4608 / part, 128, dtype};
    struct Variant {
      const char* what;
      DType kv;
      int page;
      PageLayout layout;
    };
    const Variant variants[] = {{"paged", dtype, 16, PageLayout::rows},
                                {"pages of 1", dtype, 1, PageLayout::rows},
                                {"x-packed", dtype, 16, PageLayout::x_packed},
                                {"e4m3", e4m3, 16, PageLayout::rows},
                                {"e4m3, x-packed", e4m3, 16, PageLayout::x_packed}};
    for (const Variant& v : variants) {
      const auto shape = [&](int kv_heads) {
        return CacheShape{kv_heads, 128, v.kv, v.page, v.layout, true};
      };
      const Json about{{"section", "plain"}, {"what", v.what}, {"dtype", name(dtype)}};
      attempt(about, [&] {
        beside_plain<Decode>(s, kernels, "plain decode", one, shape(one.kv_heads), v.what);
      });
      attempt(about, [&] {
        beside_plain<Chunk>(s, kernels, "plain chunked", chunk, shape(chunk.kv_heads), v.what);
      });
    }
  }
}

// ---- the command line ---------------------------------------------------------------------------

int run(int argc, char** argv) {
  Settings s;
  std::string device = "cuda";
  std::vector<std::string> layouts = {"rows"};
  CLI::App app("Times the serving kernels; a line of JSON for each case.");
  app.add_option("--device", device, "cuda or host")->check(CLI::IsMember({"cuda", "host"}));
  app.add_option("--section", s.sections, "copy, merge, decode, chunked [all]; layer; plain")
      ->check(CLI::IsMember({"copy", "merge", "decode", "chunked", "layer", "plain"}));
  app.add_option("--row", s.rows, "Only these rows of the tables, from 0");
  app.add_option("--layout", layouts, "Of pages: rows, x-packed")
      ->check(CLI::IsMember({"rows", "x-packed"}));
  app.add_option("--page", s.pages, "Keys in a page")->check(CLI::Range(1, 65536));
  app.add_option("--kv-dtype", s.kv_dtype, "Of the cache: bf16, e4m3, e5m2")
      ->check(CLI::IsMember({"bf16", "e4m3", "e5m2"}));
  app.add_option("--tokens", s.tokens, "New tokens of a sequence in decode")
      ->check(CLI::Range(1, 4096));
  app.add_option("--window", s.window, "Sliding window in decode; 0: none")
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--threads", s.threads, "On the host; 0: all");
  app.add_flag("--identity", s.identity, "Pages in order instead of permuted");
  app.add_flag("--tiny", s.tiny, "Small sizes, for a try");
  CLI11_PARSE(app, argc, argv);
  s.device = device == "cuda" ? Device::cuda : Device::host;
  for (const std::string& layout : layouts)
    s.layouts.push_back(layout == "rows" ? PageLayout::rows : PageLayout::x_packed);
  if (s.sections.empty()) s.sections = {"copy", "merge", "decode", "chunked"};

  const Kernels kernels(s.device, s.threads);
  for (const std::string& section : s.sections) {
    if (section == "copy") copy(s);
    if (section == "merge") merge(s, kernels);
    if (section == "decode")
      over_caches(s, "decode", kDecode, [&](const DecodeRow& row, int page, PageLayout layout) {
        decode(s, kernels, row, page, layout);
      });
    if (section == "layer")
      for (std::size_t r = 0; r < std::size(kLayer); ++r)
        if (s.takes(r)) attempt({{"section", "layer"}, {"row", r}}, [&] { layer(s, kLayer[r]); });
    if (section == "chunked")
      over_caches(s, "chunked", kChunk, [&](const ChunkRow& row, int page, PageLayout layout) {
        chunked(s, kernels, row, page, layout);
      });
    if (section == "plain") beside_plain(s, kernels);
  }
  return all_right ? 0 : kWrongResult;
}

}  // namespace
}  // namespace longspan::bench

int main(int argc, char** argv) {
  try {
    return longspan::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_serving: %s\n", error.what());
    return 1;
  }
}
