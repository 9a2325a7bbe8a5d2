// Work that is done again and again on a stream, and the time of each repetition: a CUDA graph on a
// GPU, a loop and a clock on the host.
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
  /// Of each repetition that the last queue() asked for; blocks until they are done.
  virtual std::vector<double> milliseconds() const = 0;
};

/// A stream of one's own on a GPU; on the host nothing.
class Queue {
 public:
  explicit Queue(Device device);
  ~Queue();

  Stream stream() const;
  /// `work` must queue the same each time: on a GPU it is captured, here and once.
  std::unique_ptr<Replays> repeat(std::function<void(Stream)> work) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Bytes that this process could take now, of the current GPU or the host.
std::size_t free_memory(Device device);

}  // namespace longspan::launcher
