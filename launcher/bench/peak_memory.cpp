#include "launcher/bench/peak_memory.hpp"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace longspan::launcher {
namespace {

/// A line of /proc/self/status, in bytes.
std::optional<double> status(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    double kib = 0;
    if (words >> word >> kib && word == name) return kib * 1024;
  }
  return std::nullopt;
}

}  // namespace

PeakMemory::PeakMemory() {
#if defined(__GLIBC__)
  malloc_trim(0);  // freed memory that the allocator kept would be taken again, and not be seen
#endif
  base_ = status("VmRSS:");
  restart();
}

void PeakMemory::restart() {
  std::ofstream file("/proc/self/clear_refs");
  if (!(file << "5" << std::flush)) base_.reset();  // the peak would be that of earlier work
}

std::optional<double> PeakMemory::grown() const {
  const std::optional<double> peak = status("VmHWM:");
  if (!base_ || !peak) return std::nullopt;
  return std::max(0.0, *peak - *base_);
}

}  // namespace longspan::launcher
