// The refusals of tensors that share memory, against every byte of them.
#include "src/arguments/tensor_checks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include "longspan/error.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::tests {
namespace {

constexpr std::int64_t kBytes = 512;

/// Which bytes of the memory have an element of the tensor.
std::vector<bool> bytes_of(const Tensor& t, const std::byte* memory) {
  std::vector<bool> taken(kBytes);
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  const std::int64_t begin = static_cast<const std::byte*>(t.data) - memory;
  for (std::int64_t i = 0; i < t.size(); ++i) {
    std::int64_t at = begin, rest = i;
    for (int d = t.dims - 1; d >= 0; --d) {
      at += rest % t.shape[d] * t.stride[d] * size;
      rest /= t.shape[d];
    }
    for (std::int64_t b = at; b < at + size; ++b) taken.at(static_cast<std::size_t>(b)) = true;
  }
  return taken;
}

/// Some tensor in the memory: dense, with gaps, or with elements that have several indices.
Tensor some_tensor(std::byte* memory, std::mt19937& random) {
  for (;;) {
    Tensor t;
    t.dtype = random() % 2 == 0 ? DType::fp32 : DType::bf16;
    t.dims = 1 + static_cast<int>(random() % 3);
    const auto size = static_cast<std::int64_t>(size_of(t.dtype));
    std::int64_t last = 0, step = 1;
    for (int d = t.dims - 1; d >= 0; --d) {
      t.shape[d] = 1 + static_cast<std::int64_t>(random() % 5);
      t.stride[d] = random() % 3 == 0 ? static_cast<std::int64_t>(random() % 20) : step;
      step = t.shape[d] * t.stride[d];
      last += (t.shape[d] - 1) * t.stride[d];
    }
    const std::int64_t room = kBytes / size - last;
    if (room <= 0) continue;
    t.data = memory + size * static_cast<std::int64_t>(random() % static_cast<unsigned>(room));
    return t;
  }
}

bool is_refused(const Tensor& out, const Tensor& in) {
  try {
    check_overlap(out, "out", in, "in");
    return false;
  } catch (const InputError&) {
    return true;
  }
}

TEST(TensorChecks, WhatSharesMemoryIsRefusedAndNothingElse) {
  const unsigned seed = fresh_seed();
  std::mt19937 random(seed);
  alignas(8) std::byte memory[kBytes];
  const auto has_gaps = [](const std::vector<bool>& bytes) {
    const auto first = std::find(bytes.begin(), bytes.end(), true);
    const auto last = std::find(bytes.rbegin(), bytes.rend(), true).base();
    return std::find(first, last, false) != last;
  };
  int refused = 0, between_gaps = 0;
  for (int round = 0; round < 20000; ++round) {
    const Tensor a = some_tensor(memory, random), b = some_tensor(memory, random);
    const std::vector<bool> bytes_a = bytes_of(a, memory), bytes_b = bytes_of(b, memory);
    bool share = false;
    for (std::size_t i = 0; i < kBytes; ++i) share = share || (bytes_a[i] && bytes_b[i]);
    const bool is = is_refused(a, b);
    EXPECT_EQ(is, is_refused(b, a)) << "seed " << seed << ", round " << round;
    if (is) {
      EXPECT_TRUE(share) << "seed " << seed << ", round " << round;
    }
    if (!has_gaps(bytes_a) && !has_gaps(bytes_b)) {
      EXPECT_EQ(is, share) << "seed " << seed << ", round " << round;
    }
    refused += is;
    between_gaps += share && !is;
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(between_gaps, 0);  // which is not inspected
}

TEST(TensorChecks, RowsThatShareHeadsOverlapAsDenseOnesDo) {
  std::vector<float> memory(1024);
  const Tensor out(memory.data(), {4, 4, 32});
  Tensor in(memory.data() + 2, {4, 2, 32});
  in.stride[1] = 16;  // half of each head is the next one's
  EXPECT_TRUE(is_refused(out, in));
  in.stride = {0, 0, 1};
  EXPECT_TRUE(is_refused(out, in));
  in.data = memory.data() + 512;
  EXPECT_FALSE(is_refused(out, in));
}

}  // namespace
}  // namespace longspan::tests
