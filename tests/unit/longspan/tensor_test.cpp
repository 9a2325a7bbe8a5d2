// The properties of a Tensor.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "longspan/error.hpp"
#include "longspan/tensor.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {
namespace {

/// The product of the other extents does not fit into 63 bits; the sanitizers look at its place.
TEST(Tensor, AnExtentOfZeroDecidesItsSize) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  Tensor t(static_cast<float*>(nullptr), {1, 1, 1});
  for (int empty = 0; empty < 3; ++empty) {
    for (int d = 0; d < 3; ++d) t.shape[d] = d == empty ? 0 : most;
    EXPECT_EQ(t.size(), 0);
    EXPECT_NO_THROW(check_tensor(t, "t", fp32, Device::host));
  }
}

TEST(Tensor, HasTheStridesThatItWasGiven) {
  float values[12];
  const Tensor dense(values, {3, 4}), turned(values, {4, 3}, {1, 4});
  EXPECT_EQ(dense.stride[0], 4);
  EXPECT_EQ(turned.dims, 2);
  EXPECT_EQ(turned.shape[0], 4);
  EXPECT_EQ(turned.stride[0], 1);
  EXPECT_EQ(turned.stride[1], 4);
  const Tensor same(values, fp32, {2, 3}, {0, 4}, Device::cuda);
  EXPECT_EQ(same.stride[0], 0);
  EXPECT_EQ(same.device, Device::cuda);
  EXPECT_THROW(Tensor(values, {4, 3}, {1}), InputError);
  EXPECT_THROW(Tensor(values, {4, 3}, {1, 2, 3}), InputError);
  EXPECT_THROW(Tensor(values, fp32, {4, 3}, {1, -4}), InputError);
}

TEST(Tensor, SizesThatNoMemoryHasAreRefused) {
  float one = 0;
  for (const std::int64_t extent : {std::int64_t{1} << 31, std::int64_t{1} << 62}) {
    Tensor t(&one, {1, 1, 1});
    for (int d = 0; d < 3; ++d) t.shape[d] = extent;
    EXPECT_THROW(check_tensor(t, "t", fp32, Device::host), InputError);
  }
}

}  // namespace
}  // namespace longspan
