// What a layer and class ServingOps report about arrays on a GPU: by name, when asked to check, and
// at the place that waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"

namespace longspan {
namespace {

using ::testing::HasSubstr;

constexpr int kHeads = 4, kKvHeads = 2, kDim = 64, kPage = 16, kPages = 9, kTokens = 4;

template <class T>
Buffer on_gpu(const std::vector<T>& values) {
  Buffer buffer(Device::cuda, values.size() * sizeof(T));
  buffer.upload(values.data());
  return buffer;
}

void expect_fault(const std::string& text, const std::function<void()>& call) {
  SCOPED_TRACE(text);
  try {
    call();
    ADD_FAILURE() << "nothing was reported";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

/// Two sequences of 1 and 3 new tokens, 20 and 33 keys in all, in pages of fp32.
struct Batch {
  std::vector<std::int32_t> table{7, 2, -1, -1, 0, 5, 3, -1}, start{0, 1, 4}, kv_len{20, 33};
  std::vector<std::int64_t> slots{3, 4, 5, -1};
};

class GpuFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
      GTEST_SKIP() << "no GPU: cudaGetDeviceCount found none";
    const auto filled = [](std::size_t n, float value) {
      return on_gpu(std::vector<float>(n, value));
    };
    q = filled(kTokens * kHeads * kDim, 0.5f);
    k = filled(kPages * kPage * kKvHeads * kDim, 0.25f);
    v = filled(kPages * kPage * kKvHeads * kDim, 0.25f);
    fresh = filled(kTokens * kKvHeads * kDim, 0.25f);
    out = filled(kTokens * kHeads * kDim, NAN);
  }

  static Tensor tensor(const Buffer& memory, std::initializer_list<std::int64_t> shape) {
    return Tensor(memory.data(), fp32, shape, Device::cuda);
  }
  Tensor rows(const Buffer& memory, int heads) const {
    return tensor(memory, {kTokens, heads, kDim});
  }
  Tensor pages(const Buffer& memory) const {
    return tensor(memory, {kPages, kPage, kKvHeads, kDim});
  }

  /// A batch in the kernels' memory.
  struct Arrays {
    Tensor table, start, kv_len, slots;
  };
  template <class T>
  static Tensor view(const Buffer& buffer, std::initializer_list<std::int64_t> shape) {
    return {static_cast<const T*>(buffer.data()), shape, Device::cuda};
  }
  template <class Use>
  static void with(const Batch& batch, const Use& use) {
    const Buffer table = on_gpu(batch.table), start = on_gpu(batch.start),
                 kv_len = on_gpu(batch.kv_len), slots = on_gpu(batch.slots);
    use(Arrays{view<std::int32_t>(table, {2, 4}), view<std::int32_t>(start, {3}),
               view<std::int32_t>(kv_len, {2}), view<std::int64_t>(slots, {kTokens})});
  }

  void run(Attention& layer, const Batch& batch) {
    with(batch, [&](const Arrays& arrays) {
      layer.run({.q = rows(q, kHeads),
                 .k = pages(k),
                 .v = pages(v),
                 .out = rows(out, kHeads),
                 .query_start = arrays.start,
                 .kv_len = arrays.kv_len,
                 .block_table = arrays.table});
      layer.wait();
    });
  }

  void append(Attention& layer, const Batch& batch) {
    with(batch, [&](const Arrays& arrays) {
      layer.append({.new_k = rows(fresh, kKvHeads),
                    .new_v = rows(fresh, kKvHeads),
                    .k = pages(k),
                    .v = pages(v),
                    .query_start = arrays.start,
                    .kv_len = arrays.kv_len,
                    .block_table = arrays.table});
      layer.wait();
    });
  }

  Buffer q, k, v, fresh, out;
};

// The kernels behind a check run nevertheless, so the faults here stay in valid memory: a page of
// another sequence, a row of another sequence.
TEST_F(GpuFaults, TheLayerReportsWhenItWaits) {
  Attention layer(self(Device::cuda),
                  {.heads = kHeads,
                   .kv_heads = kKvHeads,
                   .head_dim = kDim,
                   .dtypes = {.compute = fp32},
                   .mask = {.causal = true},
                   .limits = {.max_tokens = kTokens, .max_batch = 2, .max_kv_len = 64},
                   .debug = {.check_arrays = true}});
  run(layer, {});
  std::vector<float> values(kTokens * kHeads * kDim);
  out.download(values.data());
  for (float value : values) ASSERT_FLOAT_EQ(value, 0.25f);
  append(layer, {});

  // The cache is declared one page shorter than it is.
  Batch last;
  last.table[6] = kPages - 1;
  run(layer, last);
  with(last, [&](const Arrays& arrays) {
    const auto shorter = [&](const Buffer& memory) {
      return tensor(memory, {kPages - 1, kPage, kKvHeads, kDim});
    };
    layer.run({.q = rows(q, kHeads),
               .k = shorter(k),
               .v = shorter(v),
               .out = rows(out, kHeads),
               .query_start = arrays.start,
               .kv_len = arrays.kv_len,
               .block_table = arrays.table});
    expect_fault("block_table[1][2] is 8, which is not a page", [&] { layer.wait(); });
  });
  layer.wait();  // a fault is reported once
  run(layer, last);
}

TEST_F(GpuFaults, KernelsCheckOnDemand) {
  const ServingOps kernels(Device::cuda);
  const auto check = [&](const Batch& batch) {
    with(batch, [&](const Arrays& arrays) {
      PagedAttention a;
      a.q = rows(q, kHeads);
      a.k_cache = pages(k);
      a.v_cache = pages(v);
      a.block_table = arrays.table;
      a.query_start = arrays.start;
      a.kv_len = arrays.kv_len;
      kernels.check(a);
    });
  };
  const auto faulty = [&](const std::string& text, auto change) {
    Batch batch;
    change(batch);
    expect_fault(text, [&] { check(batch); });
  };
  check({});
  faulty("block_table[1][2] is -7", [](Batch& b) { b.table[6] = -7; });
  faulty("block_table[0][1] is 9", [](Batch& b) { b.table[1] = kPages; });
  faulty("kv_len[0] is -1", [](Batch& b) { b.kv_len[0] = -1; });
  faulty("sequence 1 has 65 keys and there is room for 64", [](Batch& b) { b.kv_len[1] = 65; });
  faulty("query_start[0] is 1", [](Batch& b) { b.start[0] = 1; });
  faulty("query_start[2] is 5", [](Batch& b) { b.start[2] = 5; });

  const auto check_slots = [&](const std::vector<std::int64_t>& slots) {
    Batch batch;
    batch.slots = slots;
    with(batch, [&](const Arrays& arrays) {
      kernels.check(AppendKv{.k = rows(fresh, kKvHeads),
                             .v = rows(fresh, kKvHeads),
                             .k_cache = pages(k),
                             .v_cache = pages(v),
                             .slots = arrays.slots});
    });
  };
  check_slots({3, 4, 5, -1});
  expect_fault("slots[2] is 144, past the end", [&] { check_slots({3, 4, kPages * kPage, -1}); });
  expect_fault("goes to slot 4, which another token has too", [&] { check_slots({3, 4, 5, 4}); });
}

TEST_F(GpuFaults, ArgumentsAreRefusedBeforeAnythingIsQueued) {
  const ServingOps kernels(Device::cuda);
  SegmentedAttention a;
  PagedAttention& paged = a.attention;
  paged.q = Tensor(q.data(), fp32, {kTokens, kHeads, kDim});  // declared to be on the host
  paged.k_cache = pages(k);
  paged.v_cache = pages(v);
  with({}, [&](const Arrays& arrays) {
    paged.block_table = arrays.table;
    expect_fault("kv_len is missing", [&] { kernels.segmented_attention(a); });
    paged.query_start = arrays.start;
    paged.kv_len = arrays.kv_len;
    paged.out = rows(out, kHeads);
    expect_fault("q is on the host; the work is done on the cuda",
                 [&] { kernels.segmented_attention(a); });
    paged.q.device = Device::cuda;
    // Nor is an array that is declared to be there.
    paged.kv_len.device = Device::host;
    expect_fault("kv_len is on the host; the work is done on the cuda",
                 [&] { kernels.segmented_attention(a); });
    paged.kv_len.device = Device::cuda;
    expect_fault("this call needs", [&] { kernels.segmented_attention(a); });
  });
}

}  // namespace
}  // namespace longspan
