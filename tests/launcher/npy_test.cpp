// Input files that are not what they seem: shorter than a moment ago, without an end, or with a
// header that only looks valid.
#include "launcher/io/npy.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

namespace fs = std::filesystem;

class NpyTest : public ::testing::Test {
 protected:
  NpyTest() {
    std::string name = (fs::temp_directory_path() / "longspan_npy_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~NpyTest() override { fs::remove_all(folder_); }

  std::string path() const { return (folder_ / "x.npy").string(); }

  void save(const std::string& header, std::size_t bytes) const {
    std::string text = header;
    text.resize(118, ' ');
    std::ofstream file(path(), std::ios::binary);
    file << "\x93NUMPY\x01" << '\0' << static_cast<char>(text.size()) << '\0' << text
         << std::string(bytes, '\0');
  }
  void save_with(const std::string& order, const std::string& shape) const {
    save(fmt::format("{{'descr': '<f4', 'fortran_order': {}, 'shape': {}, }}", order, shape), 480);
  }

  fs::path folder_;
};

TEST_F(NpyTest, ReadsAnyPart) {
  save_with("False", "(40, 3)");
  const NpyFile file(path(), "fp32");
  EXPECT_EQ(file.shape(), (std::vector<std::int64_t>{40, 3}));
  std::vector<float> values(120, 1.0f);
  file.read(12, 468, values.data());
  EXPECT_EQ(values[116], 0.0f);
  EXPECT_EQ(values[117], 1.0f);
}

TEST_F(NpyTest, AFileThatBecomesShorterIsAnError) {
  constexpr std::size_t kBytes = 1 << 20;  // many pages
  save(fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({},), }}", kBytes / 4),
       kBytes);
  const NpyFile file(path(), "fp32");
  fs::resize_file(path(), 4096);
  std::vector<char> values(kBytes);
  EXPECT_THROW(file.read(0, kBytes, values.data()), InputError);
  EXPECT_THROW(file.read(kBytes - 4, 4, values.data()), InputError);
  file.read(0, 1024, values.data());  // what remains
}

TEST_F(NpyTest, APipeIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_THROW(NpyFile(path(), ""), InputError);
  EXPECT_THROW(NpyFile("/dev/zero", ""), InputError);
}

TEST_F(NpyTest, TheOrderIsTrueOrFalse) {
  for (const char* order : {"False", "False ,'x': 1", "False}"}) {
    save_with(order, "(40, 3)");
    EXPECT_NO_THROW(NpyFile(path(), "")) << order;
  }
  for (const char* order : {"True", "Falsehood", "false", "0", "", "Fals", "'False'"}) {
    save_with(order, "(40, 3)");
    EXPECT_THROW(NpyFile(path(), ""), InputError) << order;
  }
}

TEST_F(NpyTest, TheShapeIsATuple) {
  for (const char* shape : {"(40, 3)", "(40,3,)", "( 120 ,)", "()", "(2,3,4,5)"}) {
    save_with("False", shape);
    EXPECT_NO_THROW(NpyFile(path(), "")) << shape;
  }
  for (const char* shape : {"(40 3)", "(40, 3", "40, 3)", "(,40)", "(40,,3)", "(-1, 3)", "(4x, 3)",
                            "(40.0, 3)", "(99999999999999999999,)", ""}) {
    save_with("False", shape);
    EXPECT_THROW(NpyFile(path(), ""), InputError) << shape;
  }
}

}  // namespace
}  // namespace longspan::launcher
