#include "comm/control/hosts.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>

namespace longspan::comm {
namespace {

std::string count(int n, const char* noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

}  // namespace

std::string this_host() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return std::string(name) + " " + boot;
}

Place find_place(Control& control) {
  const auto hosts = control.gather(this_host(), "find the machines");
  const std::string& mine = hosts[control.rank()];
  const auto here = hosts.begin() + control.rank();
  return {static_cast<int>(std::set<std::string>(hosts.begin(), hosts.end()).size()),
          static_cast<int>(std::count(hosts.begin(), here, mine)),
          static_cast<int>(std::count(hosts.begin(), hosts.end(), mine))};
}

std::string describe(int ranks, const Place& place) {
  return count(ranks, "rank") + ", " + count(place.nodes, "node");
}

}  // namespace longspan::comm
