// One device's kernels and memory behind one interface, chosen once when a layer is made. Every
// call queues on the stream and returns; on the host it does the work.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// Marks on a stream and the time between them.
class Timer {
 public:
  virtual ~Timer() = default;
  virtual void mark(int index, Stream stream) = 0;
  virtual double milliseconds(int from, int to) const = 0;  // once the stream has passed both
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Device device() const = 0;

  /// Throws Unsupported, by name, for what these kernels cannot do.
  virtual void check(const AttendParams& params) const = 0;

  /// Most scratch that attend needs for up to `tokens` rows in up to `batch` sequences.
  virtual std::size_t attend_scratch(const AttendParams& bounds) const = 0;

  virtual void attend(const AttendParams& params, Stream stream) const = 0;
  virtual void merge(const MergeParams& params, Stream stream) const = 0;
  virtual void map_rows(const MapParams& params, Stream stream) const = 0;
  virtual void place_rows(const PlaceParams& params, Stream stream) const = 0;
  virtual void key_starts(const KeyStartParams& params, Stream stream) const = 0;

  virtual std::unique_ptr<Timer> timer(int marks) const = 0;
};

/// `threads`: 0 takes LONGSPAN_THREADS, or else the cores that this process may use.
std::unique_ptr<Backend> host_backend(int threads = 0);

/// The current GPU. Throws Unsupported in a build without CUDA.
std::unique_ptr<Backend> cuda_backend();

}  // namespace longspan::kernels
