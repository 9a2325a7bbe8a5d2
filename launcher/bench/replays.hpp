// Repeats work on a stream, and times each repetition: by a CUDA graph on a GPU, by a loop and a
// clock on the host.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "longspan/types.hpp"

namespace longspan::launcher {

class Replays {
 public:
  virtual ~Replays() = default;
  virtual void queue(int count) = 0;
  /// The milliseconds of each repetition of the last queue(); blocks until they are done.
  virtual std::vector<double> milliseconds() const = 0;
};

/// A separate stream on a GPU; none on the host.
class Queue {
 public:
  explicit Queue(Device device);
  ~Queue();

  Stream stream() const;
  /// Makes `work` repeatable. It must queue the same each time: on a GPU it is captured once, here.
  std::unique_ptr<Replays> repeat(std::function<void(Stream)> work) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The bytes that this process could allocate now, on the current GPU or the host.
std::size_t free_memory(Device device);

}  // namespace longspan::launcher
