#include "kernels/simulated/runtime/faults.hpp"

#include <mutex>

#include "kernels/simulated/runtime/settings.hpp"

namespace longspan::simulated {
namespace {

struct PlannedFault {
  std::mutex mutex;
  std::string name = settings().fail_call;
  int left = settings().fail_number;  // calls until the one that fails; 0: none
  std::string failed;
};

PlannedFault& planned_fault() {
  static PlannedFault* const one = new PlannedFault;
  return *one;
}

}  // namespace

void fail_call(const std::string& name, int number) {
  PlannedFault& p = planned_fault();
  const std::lock_guard lock(p.mutex);
  p.name = name;
  p.left = number;
  p.failed.clear();
}

std::string failed_call() {
  const std::lock_guard lock(planned_fault().mutex);
  return planned_fault().failed;
}

bool is_made_to_fail(const char* call) {
  PlannedFault& p = planned_fault();
  const std::lock_guard lock(p.mutex);
  if (p.left == 0 || (p.name != "any" && p.name != call)) return false;
  if (--p.left > 0) return false;
  p.failed = call;
  return true;
}

}  // namespace longspan::simulated
