// Which CUDA kernels run, and how much scratch they get, on GPUs given by numbers: no kernel runs
// here.
#include "kernels/cuda/dispatch/families.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "longspan/limits.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::kernels::cuda {
namespace {

/// Architectures by 10 x major + minor: shared memory of a multiprocessor and of a block.
struct Architecture {
  int number, multiprocessors, shared_bytes, block_bytes;
};
constexpr Architecture kArchitectures[] = {{80, 108, 164 * 1024, 163 * 1024},
                                           {86, 84, 100 * 1024, 99 * 1024},
                                           {90, 132, 228 * 1024, 227 * 1024},
                                           {100, 148, 228 * 1024, 227 * 1024}};

/// Replaces the kernel of an instance: the sizes of a build, in numbers near those of real ones.
KernelShape shape_of(const Instance& instance, const AttendParams& p, Lengths lengths) {
  const bool decodes = instance.family == Family::decode || is_of_mla(instance.family);
  const bool fixed_order =
      instance.family != Family::mla &&
      (instance.family != Family::portable || p.invariant || lengths != Lengths::only_long);
  KernelShape shape;
  if (decodes) shape.decode = reinterpret_cast<decltype(shape.decode)>(std::uintptr_t{1});
  shape.threads = decodes ? 160 : 128;
  shape.shared_bytes = instance.bytes;
  shape.tile_rows = instance.rows;
  if (fixed_order)
    shape.state_bytes = static_cast<std::size_t>(instance.rows) * (4 * instance.value_dim + 16);
  shape.near_levels = decodes ? 2 : 0;
  shape.resumes = !decodes;
  return shape;
}

template <int kShared>
int blocks_of(const KernelShape& shape, int) {
  return std::min(kShared / (shape.shared_bytes + 1024), 2048 / shape.threads);
}

Gpu gpu_of(const Architecture& a, bool hopper_code = true) {
  return {.multiprocessors = a.multiprocessors,
          .shared_bytes = a.shared_bytes,
          .block_bytes = a.block_bytes,
          .block_own_bytes = 1024,
          .sm90_code = a.number >= 90,
          .hopper_code = a.number == 90 && hopper_code,
          .shape = shape_of,
          .blocks = a.shared_bytes > 200 * 1024   ? blocks_of<228 * 1024>
                    : a.shared_bytes > 150 * 1024 ? blocks_of<164 * 1024>
                                                  : blocks_of<100 * 1024>};
}

/// Draws limits like those of layers and calls, and runs within them.
class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}

  AttendParams limits() {
    AttendParams p;
    p.dtype = one_of({DType::bf16, DType::fp16, DType::fp32});
    p.kv_dtype = chance(4) ? one_of({DType::e4m3, DType::e5m2}) : p.dtype;
    p.q_dtype = p.kv_dtype != p.dtype && chance(2) ? p.kv_dtype : p.dtype;
    p.kv_heads = static_cast<int>(up_to(8));
    p.heads = p.kv_heads * static_cast<int>(up_to(16));
    p.head_dim =
        one_of({64, 128, 8 * static_cast<int>(up_to(32)), static_cast<int>(up_to(256)), 576});
    p.value_dim = chance(5) ? static_cast<int>(up_to(512)) : std::min(p.head_dim, kMaxValueDim);
    p.batch.size = static_cast<int>(chance(3) ? 1 : up_to(200));
    p.tokens = p.batch.size - 1 + up_to(chance(2) ? 64 : 6000);
    if (chance(3)) p.max_query_len = (p.tokens + p.batch.size - 1) / p.batch.size - 1 + up_to(40);
    if (chance(2)) p.max_kv_len = up_to(std::int64_t{1} << up_to(24));
    p.shard.ranks = static_cast<int>(std::int64_t{1} << (up_to(4) - 1));
    p.shard.layout = one_of(
        {Layout::contiguous, Layout::interleaved, Layout::zigzag, Layout::ranges, Layout::listed});
    p.score.scale = chance(9) ? -1.0f : 0.1f;
    p.score.softcap = chance(6) ? 30.0f : 0.0f;
    p.invariant = chance(3);
    p.tf32 = chance(2);
    p.resume = chance(3);
    if (chance(9)) p.parts.count = static_cast<int>(up_to(16));
    return p;
  }

  AttendParams run(const AttendParams& limits) {
    AttendParams p = limits;
    p.batch.size = static_cast<int>(up_to(limits.batch.size));
    p.tokens = up_to(limits.tokens);
    if (p.max_query_len > 0) p.tokens = std::min(p.tokens, p.batch.size * p.max_query_len);
    if (p.batch.size > 1 || chance(2)) {  // lengths are on the device
      p.batch.query_start = p.batch.kv_len = &kSome;
    } else {
      p.shard.length = up_to(limits.max_kv_len > 0 ? limits.max_kv_len : std::int64_t{1} << 26);
    }
    p.batch.skip_decode = chance(5);
    const std::int64_t row = std::int64_t{p.heads} * p.head_dim + (chance(4) ? 1 : 0);
    p.q = {nullptr, row, p.head_dim};
    p.k = KvRows(nullptr, row, p.head_dim);
    p.v = KvRows(nullptr, row, p.value_dim);
    if (p.value_dim <= p.head_dim && chance(2)) p.v = p.k;  // the keys' first columns
    if (chance(4)) p.pages.table = &kSome;
    if (chance(6)) p.bias.slopes = Floats(&kFactor);
    if (chance(6)) p.k_scale.data = &kFactor;
    p.resume = limits.resume && chance(2);
    return p;
  }

  bool chance(int of) { return up_to(of) == 1; }

 private:
  static constexpr std::int32_t kSome = 0;
  static constexpr float kFactor = 1.0f;

  std::int64_t up_to(std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(1, most)(random_);
  }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[up_to(static_cast<std::int64_t>(all.size())) - 1];
  }

  std::mt19937 random_;
};

std::string described(const AttendParams& p) {
  return std::string(name(p.dtype)) + " over " + name(p.kv_dtype) + ", heads " +
         std::to_string(p.heads) + "/" + std::to_string(p.kv_heads) + " of " +
         std::to_string(p.head_dim) + "/" + std::to_string(p.value_dim) + ", tokens " +
         std::to_string(p.tokens) + " in " + std::to_string(p.batch.size) + ", lengths " +
         (p.batch.kv_len != nullptr ? "on the device" : std::to_string(p.shard.length)) +
         " up to " + std::to_string(p.max_kv_len) + ", queries up to " +
         std::to_string(p.max_query_len) + ", ranks " + std::to_string(p.shard.ranks) + " " +
         name(p.shard.layout) + (p.invariant ? ", invariant" : "") + (p.resume ? ", resumes" : "") +
         ", parts " + std::to_string(p.parts.count);
}

// A smaller run can need more scratch than the largest one: another instance, another family where
// its rows have another layout, or more splits. So the limits' bound is not the need of any one
// run.
TEST(KernelFamilies, TheBoundHoldsForEveryRunWithinLimits) {
  constexpr int kLimits = 4000, kRuns = 25;
  int beyond_the_largest = 0;
  for (int i = 0; i < kLimits; ++i) {
    const unsigned seed = tests::fresh_seed();
    SCOPED_TRACE(seed);
    Draw draw(seed);
    const Architecture& architecture = kArchitectures[i % std::size(kArchitectures)];
    const Gpu gpu = gpu_of(architecture, !draw.chance(4));
    const AttendParams limits = draw.limits();
    const std::size_t bound = scratch_bound(limits, gpu), largest = scratch_bytes(limits, gpu);
    for (int j = 0; j < kRuns; ++j) {
      const AttendParams run = draw.run(limits);
      const std::size_t needed = scratch_bytes(run, gpu);
      beyond_the_largest += needed > largest;
      ASSERT_LE(needed, bound) << "on " << architecture.number << ", limits of "
                               << described(limits) << ", a run of " << described(run);
    }
  }
  EXPECT_GT(beyond_the_largest, 0) << "the largest run was the bound: these draws show nothing";
}

struct Served {
  const char* by;
  Lengths lengths;
  void (*change)(AttendParams&);
};

TEST(KernelFamilies, TheFirstOfTheTableThatAcceptsServes) {
  static constexpr std::int32_t kTable = 0;
  static constexpr float kSlope = 1.0f;
  const auto e4m3 = [](AttendParams& p) {
    p.q_dtype = p.kv_dtype = DType::e4m3;
    p.fp8_products = true;
  };
  constexpr Lengths kLong = Lengths::only_long, kShort = Lengths::only_short;
  const Served cases[] = {
      {"hopper", kLong, [](AttendParams&) {}},
      {"decode", kShort, [](AttendParams&) {}},
      {"hopper in order", kLong, [](AttendParams& p) { p.invariant = true; }},
      {"hopper e4m3", kLong, e4m3},
      {"decode", kShort, e4m3},
      {"hopper", kLong, [](AttendParams& p) { p.bias.slopes = Floats(&kSlope); }},
      {"portable", kLong,
       [](AttendParams& p) {
         p.bias = {Floats(&kSlope), Alibi::sqrt};
       }},
      {"hopper", kLong, [](AttendParams& p) { p.pages.table = &kTable; }},
      {"portable", kLong,
       [](AttendParams& p) {
         p.pages.table = &kTable;
         p.head_dim = p.value_dim = 64;
       }},
      {"portable", kLong, [](AttendParams& p) { p.shard.layout = Layout::listed; }},
      {"portable", kLong, [](AttendParams& p) { p.head_dim = p.value_dim = 40; }},
      {"portable", kLong, [](AttendParams& p) { p.head_dim = p.value_dim = 125; }},
      {"portable", kLong,
       [](AttendParams& p) {
         p.head_dim = p.value_dim = 100;
         p.invariant = true;
       }},
      {"decode", kShort, [](AttendParams& p) { p.head_dim = p.value_dim = 125; }},
      {"hopper", kLong, [](AttendParams& p) { p.head_dim = 192; }},
      {"hopper", kLong, [](AttendParams& p) { p.value_dim = 64; }},
      {"hopper", kLong, [](AttendParams& p) { p.head_dim = 64; }},
      {"portable", kLong, [](AttendParams& p) { p.value_dim = 100; }},
      {"portable", kLong, [](AttendParams& p) { p.head_dim = 40; }},
      {"portable", kLong,
       [](AttendParams& p) {
         p.head_dim = 192;
         p.invariant = true;
       }},
      {"portable", kLong,
       [](AttendParams& p) {
         p.q_dtype = p.kv_dtype = DType::e4m3;
         p.value_dim = 64;
       }},
      {"hopper", kLong,
       [](AttendParams& p) {
         p.pages.table = &kTable;
         p.head_dim = 192;
       }},
      {"portable", kLong,
       [](AttendParams& p) {
         p.pages.table = &kTable;
         p.head_dim = 256;
       }},
      {"portable", kShort, [](AttendParams& p) { p.head_dim = 192; }},
      {"fp32", kLong, [](AttendParams& p) { p.head_dim = 576; }},
      {"mla in order", kShort, [](AttendParams& p) { p.head_dim = 576; }},
      {"mla", kShort,
       [](AttendParams& p) {
         p.head_dim = 576;
         p.heads = 17;
       }},
      {"fp32", kShort,
       [](AttendParams& p) {
         p.head_dim = 576;
         p.heads = 17;
         p.invariant = true;
       }},
      {"fp32", kShort,  // values that are not in the keys
       [](AttendParams& p) {
         p.head_dim = 576;
         p.v.row_stride = 256;
       }},
      {"fp32", kShort,
       [](AttendParams& p) {
         p.head_dim = 576;
         p.bias.slopes = Floats(&kSlope);
       }},
      {"fp32", kShort, [](AttendParams& p) { p.dtype = p.q_dtype = p.kv_dtype = DType::fp32; }},
      {"tf32", kLong,
       [](AttendParams& p) {
         p.dtype = p.q_dtype = p.kv_dtype = DType::fp32;
         p.tf32 = true;
       }},
  };
  const Gpu hopper = gpu_of(kArchitectures[2]), ampere = gpu_of(kArchitectures[0]);
  for (const Served& c : cases) {
    AttendParams p;
    p.dtype = p.q_dtype = p.kv_dtype = DType::bf16;
    p.tokens = 100;
    p.head_dim = p.value_dim = 128;
    p.q = {nullptr, 128, 128};
    p.k = p.v = KvRows(nullptr, 128, 128);
    p.pages.size = 16;
    p.k.page_stride = p.v.page_stride = 16 * 128;
    p.shard.length = 1000;
    c.change(p);
    const CudaFamily& found = serving(p, kind_of(p, c.lengths, hopper));
    EXPECT_STREQ(found.words.name, c.by) << described(p);
    const CudaFamily& elsewhere = serving(p, kind_of(p, c.lengths, ampere));
    const char* by = is_of_hopper(found.id) ? "portable" : is_of_mla(found.id) ? "fp32" : c.by;
    EXPECT_STREQ(elsewhere.words.name, by) << described(p);
  }
}

TEST(KernelFamilies, EachIsInTheTableOnce) {
  std::vector<Family> found;
  for (const CudaFamily& family : families()) found.push_back(family.id);
  for (const Instance& i : kInstances)
    EXPECT_EQ(std::count(found.begin(), found.end(), i.family), 1) << name(i.family);
  EXPECT_EQ(found.back(), Family::fp32) << "what takes everything comes last";
}

TEST(KernelFamilies, Fp8ProductsAreRefusedWithoutHoppersCode) {
  AttendParams p;
  p.dtype = DType::bf16;
  p.q_dtype = p.kv_dtype = DType::e4m3;
  p.fp8_products = true;
  p.tokens = 100;
  p.head_dim = p.value_dim = 128;
  EXPECT_NO_THROW(check(p, gpu_of(kArchitectures[2])));
  EXPECT_THROW(check(p, gpu_of(kArchitectures[2], false)), Unsupported);
  EXPECT_THROW(check(p, gpu_of(kArchitectures[0])), Unsupported);
}

}  // namespace
}  // namespace longspan::kernels::cuda
