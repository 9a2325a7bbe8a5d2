// Tests of a kernel that every device must pass: the bodies are in a header, and the test file of a
// device chooses the backend that runs them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/reduced.hpp"

namespace longspan::tests {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

/// Defined by the test file; null without such a device.
std::unique_ptr<kernels::Backend> make_backend();

/// A copy of host data on the kernels' device.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(Device device, const std::vector<T>& values)
      : count_(values.size()), buffer_(device, bytes_of(count_)) {
    std::vector<T> padded = values;
    padded.resize(std::max<std::size_t>(count_, 1));
    buffer_.upload(padded.data());
  }
  /// Every byte 0xff: a NaN in every float type, -1 in every integer.
  DeviceArray(Device device, std::size_t count) : count_(count), buffer_(device, bytes_of(count)) {
    const std::vector<std::byte> poison(buffer_.bytes(), std::byte{0xff});
    buffer_.upload(poison.data());
  }
  T* data() const { return static_cast<T*>(buffer_.data()); }
  std::vector<T> values() const {
    std::vector<T> host(std::max<std::size_t>(count_, 1));
    buffer_.download(host.data());
    host.resize(count_);
    return host;
  }

 private:
  static std::size_t bytes_of(std::size_t count) {
    return std::max<std::size_t>(count, 1) * sizeof(T);
  }
  std::size_t count_ = 0;
  Buffer buffer_;
};

class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    backend_ = make_backend();
    if (backend_ == nullptr) GTEST_SKIP() << "no GPU: cudaGetDeviceCount found none";
    seed_ = tests::fresh_seed();
    random_.seed(seed_);
  }
  void TearDown() override {
    if (HasFailure()) std::cerr << "seed " << seed_ << "\n";
  }
  const kernels::Backend& backend() const { return *backend_; }
  Device device() const { return backend_->device(); }
  /// Whether a simulator skips a case of this many elements, of all parts together.
  bool is_left_out(std::int64_t elements) const {
    return device() == Device::cuda && tests::is_left_out(1 + 2e-4 * static_cast<double>(elements));
  }
  template <class T>
  T reduced(T full, T small) const {
    return device() == Device::cuda ? tests::reduced(full, small) : full;
  }
  float normal() { return std::normal_distribution<float>()(random_); }
  std::int64_t below(std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random_);
  }
  template <class T>
  DeviceArray<T> on_device(const std::vector<T>& values) const {
    return DeviceArray<T>(device(), values);
  }
  template <class T>
  DeviceArray<T> poisoned(std::size_t count) const {
    return DeviceArray<T>(device(), count);
  }

  /// The message of the call's InputError.
  static std::string refusal(const std::function<void()>& call) {
    try {
      call();
    } catch (const InputError& error) {
      return error.what();
    }
    return "not refused";
  }

  std::mt19937 random_;

 private:
  std::unique_ptr<kernels::Backend> backend_;
  unsigned seed_ = 0;
};

/// Half a unit in the last place of `dtype` at `value`, and the error of fp32 arithmetic on terms
/// of size `size`: the allowance of one rounding.
inline double one_rounding(DType dtype, double value, double size) {
  constexpr double kHalfUlp[] = {0x1p-24, 0x1p-11, 0x1p-8, 0x1p-4, 0x1p-3};
  constexpr double kTiny[] = {0, 0x1p-25, 0, 0x1p-10, 0x1p-17};  // half the smallest subnormal
  const int type = static_cast<int>(dtype);
  return kHalfUlp[type] * std::abs(value) + kTiny[type] + 6e-7 * size;
}

inline double largest(DType dtype) { return dtype == DType::e4m3 ? 448 : 57344; }

}  // namespace longspan::tests
