// A test's own stream, which waits for no other.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/support/simulated.hpp"

namespace longspan::test {

class OwnStream {
 public:
  OwnStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~OwnStream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

  /// Its work waits for others. In a simulator work runs only while something waits for it.
  void expect_waits() const {
    if (tests::kSimulated) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady) << "it did not wait";
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace longspan::test
