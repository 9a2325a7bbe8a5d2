// Paged attention beside the layer on contiguous keys, on CPUs.
#include "bench/paged.hpp"
#include "bench/serving.hpp"

namespace longspan::bench {
namespace {

/// The layer over the same number of contiguous keys of the product's type.
class Plain {
 public:
  Plain(const Settings& s, Sizes sizes)
      : size_(sizes),
        layer_(self(s.device), {.heads = sizes.heads,
                                .kv_heads = sizes.kv_heads,
                                .head_dim = sizes.dim,
                                .dtypes = {.compute = sizes.dtype},
                                .mask = {.causal = true},
                                .limits = {.max_tokens = sizes.q_len, .max_kv_len = sizes.kv_len},
                                .threads = s.threads}),
        q_(s.device, {20, sizes.dtype}, {sizes.q_len, sizes.heads, sizes.dim}),
        k_(s.device, {21, sizes.dtype}, {sizes.kv_len, sizes.kv_heads, sizes.dim}),
        v_(s.device, {22, sizes.dtype}, {sizes.kv_len, sizes.kv_heads, sizes.dim}),
        out_(Array::nan(s.device, sizes.dtype, {sizes.q_len, sizes.heads, sizes.dim})) {}

  void run() {
    layer_.run(
        {.q = q_.view, .k = k_.view, .v = v_.view, .out = out_.view, .total_keys = size_.kv_len});
    layer_.wait();
  }

 private:
  Sizes size_;
  Attention layer_;
  Array q_, k_, v_, out_;
};

/// The two sides in turns; the best of each, since other work on the machine only slows.
template <class Problem>
void beside_plain(const Settings& s, const ServingOps& ops, const char* section, Sizes size,
                  CacheShape shape, const char* what) {
  const Problem problem(s.device, ops, size, shape);
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

}  // namespace

void beside_plain(const Settings& s, const ServingOps& ops) {
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
        beside_plain<Decode>(s, ops, "plain decode", one, shape(one.kv_heads), v.what);
      });
      attempt(about, [&] {
        beside_plain<Chunk>(s, ops, "plain chunked", chunk, shape(chunk.kv_heads), v.what);
      });
    }
  }
}

}  // namespace longspan::bench
