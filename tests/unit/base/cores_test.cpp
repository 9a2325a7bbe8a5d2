// Which cores a rank uses: quotas of control groups of both versions, and fair shares of a node.
#include "src/base/cores.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

namespace longspan {
namespace {

namespace fs = std::filesystem;

class Quota : public ::testing::Test {
 protected:
  Quota() : mount_(fs::path(testing::TempDir()) / ("cgroup." + std::to_string(getpid()))) {
    fs::create_directories(mount_);
  }
  ~Quota() override { fs::remove_all(mount_); }

  void write(const fs::path& path, const std::string& text) {
    fs::create_directories((mount_ / path).parent_path());
    std::ofstream(mount_ / path) << text << "\n";
  }

  fs::path mount_;
};

TEST_F(Quota, OfVersion2) {
  EXPECT_EQ(quota_of("0::/a/b\n", mount_), 0);
  write("a/b/cpu.max", "max 100000");
  EXPECT_EQ(quota_of("0::/a/b\n", mount_), 0);
  write("a/b/cpu.max", "250000 100000");
  EXPECT_EQ(quota_of("0::/a/b\n", mount_), 2.5);
  write("a/cpu.max", "150000 100000");  // the group above has less
  EXPECT_EQ(quota_of("0::/a/b\n", mount_), 1.5);
  EXPECT_EQ(quota_of("0::/c\n", mount_), 0);  // and another group nothing
}

TEST_F(Quota, OfTheRootThatAContainerSees) {
  write("cpu.max", "400000 100000");
  EXPECT_EQ(quota_of("0::/\n", mount_), 4);
  EXPECT_EQ(quota_of("0::/a/path/that/is/not/there\n", mount_), 4);
}

TEST_F(Quota, OfVersion1) {
  const std::string groups = "4:memory:/a\n3:cpuset:/a\n2:cpu,cpuacct:/a\n0::/\n";
  write("cpu,cpuacct/a/cpu.cfs_quota_us", "-1");
  write("cpu,cpuacct/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota_of(groups, mount_), 0);
  write("cpu,cpuacct/a/cpu.cfs_quota_us", "50000");
  EXPECT_EQ(quota_of(groups, mount_), 0.5);
  write("cpu/cpu.cfs_quota_us", "300000");
  write("cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota_of("1:cpu:/\n", mount_), 3);
}

TEST_F(Quota, OfTextThatIsNone) {
  for (const std::string text : {"", "\n", "0", "0:", "::", "1:cpu"})
    EXPECT_EQ(quota_of(text, mount_), 0) << text;
}

TEST(FairShare, RanksThatArePinnedApartHaveTheirOwn) {
  EXPECT_EQ(fair_share({{0, 1, 2, 3}, {4, 5}}, 0, 0), 4);
  EXPECT_EQ(fair_share({{0, 1, 2, 3}, {4, 5}}, 1, 0), 2);
}

TEST(FairShare, RanksThatAreNotPinnedShareEvenly) {
  const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(fair_share({all}, 0, 0), 8);
  EXPECT_EQ(fair_share({all, all}, 1, 0), 4);
  EXPECT_EQ(fair_share({all, all, all}, 2, 0), 2);
  EXPECT_EQ(fair_share(std::vector<std::vector<int>>(64, all), 63, 0), 1);
  // One rank is pinned, and takes a share of its cores only.
  EXPECT_EQ(fair_share({all, {0, 1}}, 0, 0), 7);
  EXPECT_EQ(fair_share({all, {0, 1}}, 1, 0), 1);
}

TEST(FairShare, NoMoreThanTheQuota) {
  const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(fair_share({all}, 0, 2.0), 2);
  EXPECT_EQ(fair_share({all}, 0, 2.9), 2);
  EXPECT_EQ(fair_share({all}, 0, 0.5), 1);
  EXPECT_EQ(fair_share({all, all}, 0, 6.0), 3);
  EXPECT_EQ(fair_share({all, all}, 0, 100.0), 4);
}

TEST(UsableCores, AreThoseOfTheAffinity) {
  const std::vector<int> before = affinity();
  ASSERT_FALSE(before.empty());
  EXPECT_LE(usable_cores(), static_cast<int>(before.size()));
  std::thread([&] {  // a separate thread, since it stays pinned
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(before.back(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(affinity(), std::vector<int>{before.back()});
    EXPECT_EQ(usable_cores(), 1);
  })
      .join();
}

}  // namespace
}  // namespace longspan
