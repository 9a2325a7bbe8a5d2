// Random shapes of prefill and of mixed batches, 2,000 of them: random dims, groups, lengths,
// masks, caps, ALiBi, layouts, ranks and strides. The backend chooses the kernel: on Hopper that
// for long queries, wherever it supports the shape. It is compared with float64 on sampled rows,
// and with the fixed order, of Hopper or of the portable kernel, on every row. The same bits from
// run to run. Keys that no row may see are NaN, and so is every output beforehand.
//
// LONGSPAN_SWEEP=N runs another number of shapes.
#include <cstdlib>
#include <iostream>

#include "tests/gpu/gpu_judge.hpp"
#include "tests/gpu/long_queries.hpp"
#include "tests/support/serving.hpp"

namespace longspan::test {
namespace {

constexpr int kShapes = 2000;
constexpr int kAtOnce = 64;  // shapes whose inputs are made and results judged side by side
constexpr int kShort = 16;   // longest query of the decode kernel

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  /// Small ones as often as large ones, on a logarithmic scale.
  int length(int least, int most) {
    const double low = std::log(least), high = std::log(most + 1);
    const double at = std::uniform_real_distribution<double>(low, high)(random_);
    return std::min(most, static_cast<int>(std::exp(at)));
  }
  unsigned seed() { return static_cast<unsigned>(random_()); }

 private:
  std::mt19937 random_;
};

void draw_lengths(Case& c, Draw& draw) {
  const int most = reduced(3000, 500);
  const int batch = draw.one_in(2) ? 1 : 2 + draw.below(4);
  c.q_lens.clear();
  c.kv_lens.clear();
  for (int b = 0; b < batch; ++b) {
    const bool is_long = batch == 1 || b == 0 || draw.one_in(2);
    const int q = is_long ? draw.length(kShort + 1, reduced(600, 150)) : draw.below(kShort + 1);
    const int kind = draw.below(8);
    const int kv = kind == 0   ? draw.below(q + 1)  // some rows see nothing
                   : kind == 1 ? 0
                   : kind < 4  ? q
                               : std::min(most, q + draw.length(1, most));
    c.q_lens.push_back(q);
    c.kv_lens.push_back(kv);
  }
}

Case draw_case(unsigned seed) {
  Draw draw(seed);
  Case c;
  c.seed = draw.seed();
  c.dtype = draw.one_in(2) ? DType::bf16 : DType::fp16;
  c.dim = 16 + 8 * draw.below(31);
  constexpr int kGroups[] = {1, 1, 2, 3, 4, 5, 7, 8};
  c.kv_heads = 1 + draw.below(3);
  c.heads = c.kv_heads * kGroups[draw.below(8)];
  draw_lengths(c, draw);

  c.mask.causal = !draw.one_in(3);
  if (draw.one_in(3)) c.mask.window = draw.length(1, 1500);
  if (draw.one_in(4)) c.mask.right = draw.below(40);
  if (draw.one_in(3)) c.softcap = draw.one_in(2) ? 5.0f : draw.one_in(2) ? 50.0f : 0.5f;
  if (draw.one_in(3)) c.alibi = draw.one_in(2) ? Alibi::context : Alibi::query;
  if (draw.one_in(8))
    for (int b = 0; b < c.batch(); ++b) c.causal.push_back(draw.one_in(2));
  if (draw.one_in(6)) c.scale = draw.one_in(5) ? -0.1f : 0.6f;
  c.sinks = draw.one_in(3);

  c.ranks = draw.one_in(2) ? 1 : 2 + draw.below(3);
  constexpr Layout kLayouts[] = {Layout::contiguous, Layout::contiguous,  Layout::zigzag,
                                 Layout::striped,    Layout::interleaved, Layout::interleaved,
                                 Layout::ranges,     Layout::listed};
  c.layout = kLayouts[draw.below(c.batch() == 1 ? 8 : 7)];  // a list is of one sequence
  constexpr std::int64_t kBlocks[] = {1, 16, 80, 128, 256};
  c.block = kBlocks[draw.below(5)];
  c.device_lengths = draw.one_in(2);
  // Rows at multiples of 16 bytes, and at others, for which the portable kernel runs.
  const auto gap = [&] { return draw.one_in(3) ? 8 * (1 + draw.below(6)) : 0; };
  c.q_gap = gap();
  c.kv_gap = gap();
  c.out_gap = gap();
  if (draw.one_in(12)) (draw.one_in(2) ? c.q_gap : c.out_gap) = 3;
  return c;
}

/// NaN in keys and values that no row of their sequence sees.
void hide(const Case& c, Data& data) {
  const std::int64_t row =
      std::int64_t{c.kv_heads} * c.dim * static_cast<std::int64_t>(size_of(c.dtype));
  for (std::size_t b = 0; b < c.q_lens.size(); ++b) {
    std::vector<bool> seen(static_cast<std::size_t>(c.kv_lens[b]));
    for (int t = 0; t < c.q_lens[b]; ++t) {
      const Interval keys = c.visible(b, t);
      for (std::int64_t key = keys.begin; key < keys.end; ++key)
        seen[static_cast<std::size_t>(key)] = true;
    }
    for (std::int64_t key = 0; key < c.kv_lens[b]; ++key) {
      if (seen[static_cast<std::size_t>(key)]) continue;
      std::fill_n(data.k[b].begin() + key * row, row, std::byte{0xff});
      std::fill_n(data.v[b].begin() + key * row, row, std::byte{0xff});
    }
  }
}

/// Of the elements that are numbers.
struct Size {
  double largest = 0;  // |x|
  double norm = 0;     // of a head of a row
};

Size size_of_rows(const std::vector<std::byte>& rows, DType dtype, int dim) {
  Size size;
  const auto count = static_cast<std::int64_t>(rows.size() / size_of(dtype));
  for (std::int64_t at = 0; at < count; at += dim) {
    double squares = 0;
    for (int d = 0; d < dim; ++d) {
      const double x = launcher::load(rows.data(), dtype, at + d);
      if (std::isnan(x)) continue;
      size.largest = std::max(size.largest, std::abs(x));
      squares += x * x;
    }
    size.norm = std::max(size.norm, std::sqrt(squares));
  }
  return size;
}

/// Two kernels' results, all rows: each element may be off by the bound of expect_within_rounding,
/// with sum p |v| <= max |v| and |score| <= scale |q| |k|. Both add products in the same groups and
/// order, so the cuts of a tensor core give both the same lse.
void expect_alike(const Case& c, const Data& data, const Result& a, const Result& b) {
  const double unit = c.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  const double smallest = c.dtype == DType::bf16 ? 0x1p-134 : 0x1p-25;
  constexpr double kSingle = 3e-6;
  const double q = size_of_rows(data.q, c.dtype, c.dim).norm;
  std::int64_t row = 0;
  for (std::size_t s = 0; s < c.q_lens.size(); ++s) {
    const double k = size_of_rows(data.k[s], c.dtype, c.dim).norm;
    const double v = size_of_rows(data.v[s], c.dtype, c.dim).largest;
    const double bias = c.alibi ? data.slopes[0] * c.kv_lens[s] : 0.0;  // the largest slope's
    const double single = kSingle * (1 + std::abs(c.scale_used()) * q * k) + kOfBias * bias;
    const double moved = v * (unit + single + c.kv_lens[s] * smallest);
    std::int64_t wrong = 0;
    std::string first;
    for (const std::int64_t last = row + std::int64_t{c.q_lens[s]} * c.heads; row < last; ++row) {
      const auto at = static_cast<std::size_t>(row);
      const double lse = a.lse[at], other = b.lse[at];
      bool right = lse == other || std::abs(lse - other) <= 2 * 2e-6 * (1 + std::abs(other));
      for (int d = 0; d < c.dim; ++d) {
        const double x = launcher::load(a.out.data(), c.dtype, row * c.dim + d);
        const double y = launcher::load(b.out.data(), c.dtype, row * c.dim + d);
        const double exact = 1.01 * (std::max(std::abs(x), std::abs(y)) + moved);
        const double bound = moved + (exact + moved) * unit + single * exact + smallest;
        right = right && std::abs(x - y) <= 2 * bound;
      }
      if (right) continue;
      if (wrong++ == 0)
        first = "row " + std::to_string(row) + ", lse " + std::to_string(lse) + " and " +
                std::to_string(other);
    }
    EXPECT_EQ(wrong, 0) << "rows of sequence " << s
                        << " differ from those in the fixed order: " << first << "; " << c;
  }
}

struct Shape {
  Case c;
  std::unique_ptr<Data> data;
  Result chosen, ordered;
  std::optional<Result> finished;  // attend and merge in one
  bool hopper = false;             // long queries run there

  void make(unsigned seed) {
    c = draw_case(seed);
    data = std::make_unique<Data>(c);
    hide(c, *data);
  }

  void run() {
    GpuRun run(c, *data);
    hopper =
        is_on_hopper(run.params(0)) && *std::max_element(c.q_lens.begin(), c.q_lens.end()) > kShort;
    chosen = run.run();
    {
      SCOPED_TRACE(::testing::Message() << "two runs of " << c);
      expect_same_bits(chosen, run.run());
    }
    run.poison();
    if (c.ranks == 1 && run.queue_finished()) finished = run.result();
    Case in_order = c;
    in_order.invariant = true;
    ordered = GpuRun(in_order, *data).run();
  }

  void judge() const {
    const int stride = 1 + static_cast<int>(c.tokens() / 12);
    expect_within_rounding(c, *data, chosen, stride);
    expect_alike(c, *data, chosen, ordered);
    if (!finished) return;
    expect_within_rounding(c, *data, *finished, stride);
    expect_alike(c, *data, *finished, ordered);
  }
};

TEST(Sweep, RandomShapes) {
  LONGSPAN_NEEDS_GPU();
  const char* asked = std::getenv("LONGSPAN_SWEEP");
  const int drawn = asked != nullptr ? std::atoi(asked) : kShapes;
  const unsigned seed = fresh_seed();
  std::cout << "seed " << seed << "\n";
  int on_hopper = 0, capped = 0, biased = 0, finished = 0;
  std::vector<unsigned> seeds;
  for (int i = 0; i < drawn; ++i) {
    const unsigned own = seed + static_cast<unsigned>(i);
    if (!is_left_out(5 * work_of(draw_case(own)))) seeds.push_back(own);
  }
  const int shapes = static_cast<int>(seeds.size());
  for (int first = 0; first < shapes && !::testing::Test::HasFailure(); first += kAtOnce) {
    std::vector<Shape> some(static_cast<std::size_t>(std::min(kAtOnce, shapes - first)));
    const auto count = static_cast<std::int64_t>(some.size());
    tests::in_parallel(count, [&](std::int64_t i) {
      some[static_cast<std::size_t>(i)].make(seeds[static_cast<std::size_t>(first + i)]);
    });
    for (Shape& shape : some) {
      shape.run();
      on_hopper += shape.hopper;
      capped += shape.hopper && shape.c.softcap != 0;
      biased += shape.hopper && shape.c.alibi.has_value();
      finished += shape.finished.has_value();
    }
    tests::in_parallel(count, [&](std::int64_t i) { some[static_cast<std::size_t>(i)].judge(); });
  }
  std::cout << shapes << " shapes, " << on_hopper << " with rows of the Hopper kernel (" << capped
            << " capped, " << biased << " with ALiBi), " << finished
            << " attended and merged in one\n";
  cudaDeviceProp gpu;
  ASSERT_EQ(cudaGetDeviceProperties(&gpu, 0), cudaSuccess);
  if (gpu.major == 9 && shapes >= 100) {
    EXPECT_GT(on_hopper, shapes / 3);
    EXPECT_GT(capped, shapes / 20);
    EXPECT_GT(biased, shapes / 20);
  }
}

}  // namespace
}  // namespace longspan::test
