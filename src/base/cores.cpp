#include "src/base/cores.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace longspan {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// quota / period of one control group, or 0.
double quota_in(const fs::path& group) {
  double quota = 0, period = 0;
  std::istringstream two(read(group / "cpu.max"));  // "max 100000" without a quota
  if (two >> quota >> period && period > 0) return quota / period;
  std::istringstream one(read(group / "cpu.cfs_quota_us") + " " +  // -1 without a quota
                         read(group / "cpu.cfs_period_us"));
  if (one >> quota >> period && quota > 0 && period > 0) return quota / period;
  return 0;
}

/// The least quota of the group at `path` below `mount` and of the groups above it. A container may
/// see its own group as the root, under a path that does not exist there, so the root always
/// counts.
double least_quota(const fs::path& mount, const fs::path& path) {
  double least = quota_in(mount);
  fs::path at = mount;
  for (const fs::path& part : path.relative_path()) {
    at /= part;
    const double own = quota_in(at);
    if (own > 0 && (least == 0 || own < least)) least = own;
  }
  return least;
}

}  // namespace

std::vector<int> affinity() {
  std::vector<int> cores;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

double quota_of(const std::string& groups, const fs::path& mount) {
  double least = 0;
  std::istringstream lines(groups);
  for (std::string line; std::getline(lines, line);) {  // number:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    double own = 0;
    if (controllers.empty())
      own = least_quota(mount, path);
    else if (("," + controllers + ",").find(",cpu,") != std::string::npos)
      own = least_quota(mount / (fs::exists(mount / controllers) ? controllers : "cpu"), path);
    if (own > 0 && (least == 0 || own < least)) least = own;
  }
  return least;
}

double own_quota() { return quota_of(read("/proc/self/cgroup"), "/sys/fs/cgroup"); }

int usable_cores() {
  const std::vector<int> own = affinity();
  if (!own.empty()) return fair_share({own}, 0, own_quota());
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int fair_share(const std::vector<std::vector<int>>& cores, int own, double quota) {
  double share = 0;
  for (const int core : cores[own]) {
    const auto sharing = std::count_if(cores.begin(), cores.end(), [&](const auto& other) {
      return std::find(other.begin(), other.end(), core) != other.end();
    });
    share += 1.0 / static_cast<double>(sharing);
  }
  // A part of a core is too little for a thread; a deficit from rounding does not count.
  if (quota > 0) share = std::min(share, quota / static_cast<double>(cores.size()));
  return std::max(1, static_cast<int>(share + 1e-6));
}

}  // namespace longspan
