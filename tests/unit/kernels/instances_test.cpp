// The shared memory of every instance of the attention kernels against the limit of a GPU's thread
// block. 8.6, 8.9 and 12.0 have 99 KB, and head dims above 128 had no instance that fits: making a
// layer ended with a bare CUDA error.
#include "kernels/cuda/dispatch/instances.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "kernels/cuda/dispatch/families.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kSmall = 99 * 1024, kAmpere = 163 * 1024, kHopper = 227 * 1024;

constexpr bool all_fit() {
  return std::all_of(std::begin(kInstances), std::end(kInstances), [](const Instance& i) {
    return i.bytes <= (is_of_hopper(i.family) || is_of_mla(i.family) ? kHopper : kAmpere);
  });
}
static_assert(all_fit(), "an instance fits no GPU that it is for");
static_assert(kEnoughBytes == kAmpere);

/// The instance that the table of families chooses where blocks have this many bytes, for rows that
/// are the family's where its instances fit; null where none does.
const Instance* serving_instance(Family family, Loader loader, int head_dim, int value_dim,
                                 std::int64_t rows, int block_bytes) {
  AttendParams p;
  p.tf32 = family == Family::tf32;
  p.dtype = p.tf32 || family == Family::fp32 ? DType::fp32 : DType::bf16;
  p.tokens = family == Family::decode ? 1 : kShortQuery + 1;
  p.heads = static_cast<int>(rows);
  p.head_dim = head_dim;
  p.value_dim = value_dim;
  Gpu gpu;
  gpu.block_bytes = block_bytes;
  const Lengths lengths = family == Family::decode ? Lengths::only_short : Lengths::only_long;
  const Kind kind{lengths, loader, gpu};
  const CudaFamily* found = first_that_accepts(families(), p, kind);
  return found != nullptr ? instance_for(found->id, p, kind) : nullptr;
}

/// Requests to the families, and the resulting instances.
template <class Look>
void for_all(const Look& look) {
  for (const Family family : {Family::decode, Family::portable, Family::fp32, Family::tf32})
    for (const Loader loader : {Loader::plain, Loader::any16, Loader::any8}) {
      if (family == Family::tf32 && loader != Loader::any16) continue;
      if (family == Family::fp32 && loader == Loader::any8) continue;
      for (int dim = 16; dim <= 256; dim += 8)
        for (const std::int64_t rows : {1, 8, 9, 16, 17, 32, 33, 2048}) {
          SCOPED_TRACE(std::string(name(family)) + " " + std::to_string(static_cast<int>(loader)) +
                       " dim " + std::to_string(dim) + " rows " + std::to_string(rows));
          look(family, loader, dim, rows);
        }
    }
}

TEST(Instances, EveryCallHasOneThatFitsEveryGpu) {
  for (const int block : {kSmall, kAmpere, kHopper})
    for_all([&](Family family, Loader loader, int dim, std::int64_t rows) {
      const Instance* found = serving_instance(family, loader, dim, dim, rows, block);
      ASSERT_NE(found, nullptr) << "in " << block;
      EXPECT_LE(found->bytes, block);
      EXPECT_GE(found->dim, dim);
      // Only decode writes new keys, on any GPU; fp32 that is not plain reads anything.
      EXPECT_EQ(found->family == Family::decode, family == Family::decode);
      EXPECT_TRUE(found->loader == loader ||
                  (found->family == Family::fp32 && found->loader == Loader::any16));
    });
}

TEST(Instances, AreTheFirstChoiceWhereTheyFit) {
  for (const int block : {kAmpere, kHopper})
    for_all([&](Family family, Loader loader, int dim, std::int64_t rows) {
      EXPECT_EQ(serving_instance(family, loader, dim, dim, rows, block),
                instance_of(family, loader, dim, dim, rows));
    });
  for_all([&](Family family, Loader loader, int dim, std::int64_t rows) {
    if (dim > 128) return;
    EXPECT_EQ(serving_instance(family, loader, dim, dim, rows, kSmall),
              instance_of(family, loader, dim, dim, rows));
  });
}

TEST(Instances, LargeHeadDimsTakeAnotherInSmallBlocks) {
  for (const Loader loader : {Loader::plain, Loader::any16, Loader::any8})
    for (const int dim : {136, 192, 200, 256}) {
      SCOPED_TRACE(dim);
      const Instance* portable = instance_of(Family::portable, loader, dim, dim, 2048);
      EXPECT_GT(portable->bytes, kSmall);
      const Instance* found = serving_instance(Family::portable, loader, dim, dim, 2048, kSmall);
      EXPECT_EQ(found, instance_of(Family::fp32, Loader::any16, 256, 256, 2048));
      const Instance* decode = serving_instance(Family::decode, loader, dim, dim, 32, kSmall);
      EXPECT_EQ(decode->rows, loader == Loader::any8 ? 32 : 8);
    }
  EXPECT_EQ(serving_instance(Family::tf32, Loader::any16, 256, 256, 2048, kSmall)->family,
            Family::fp32);
}

TEST(Instances, WhereNoneFitsThereIsNone) {
  constexpr int kTuring = 64 * 1024;
  EXPECT_EQ(serving_instance(Family::portable, Loader::plain, 256, 256, 2048, kTuring), nullptr);
  EXPECT_EQ(serving_instance(Family::decode, Loader::plain, 256, 256, 1, kTuring), nullptr);
  EXPECT_NE(serving_instance(Family::portable, Loader::plain, 128, 128, 2048, kTuring), nullptr);
  EXPECT_EQ(instance_of(Family::portable, Loader::plain, 264, 264, 2048), nullptr);
  // The wider of the two counts; heads wider than 256 have one instance, which fits everywhere.
  EXPECT_EQ(instance_of(Family::portable, Loader::plain, 192, 128, 2048)->dim, 192);
  EXPECT_EQ(instance_of(Family::portable, Loader::plain, 40, 72, 2048)->dim, 96);
  EXPECT_EQ(serving_instance(Family::portable, Loader::any8, 576, 512, 2048, kSmall),
            instance_of(Family::fp32, Loader::any16, 576, 512, 1));
  EXPECT_EQ(serving_instance(Family::fp32, Loader::plain, 8, 264, 2048, kSmall)->value_dim, 512);
  EXPECT_EQ(instance_of(Family::fp32, Loader::any16, 584, 512, 1), nullptr);
}

// The table and the tiles that Hopper's kernel chooses from are walked in the same way.
TEST(Instances, HeadsOfTwoWidthsTakeTheNarrowestOnHopper) {
  struct Heads {
    int head_dim, value_dim, of_instance, values_of_instance;
  };
  for (const Heads& h :
       {Heads{192, 128, 192, 128}, Heads{136, 72, 192, 128}, Heads{160, 136, 192, 192},
        Heads{192, 192, 192, 192}, Heads{128, 64, 128, 64}, Heads{64, 128, 128, 128},
        Heads{96, 64, 128, 64}, Heads{96, 72, 96, 96}, Heads{64, 40, 64, 64},
        Heads{136, 64, 192, 128}, Heads{200, 128, 256, 256}, Heads{48, 256, 256, 256}})
    for (const std::int64_t rows : {1, 128, 500}) {
      const Instance* found =
          instance_of(Family::hopper, Loader::any16, h.head_dim, h.value_dim, rows);
      ASSERT_NE(found, nullptr);
      EXPECT_EQ(found->dim, h.of_instance) << h.head_dim << "/" << h.value_dim;
      EXPECT_EQ(found->value_dim, h.values_of_instance) << h.head_dim << "/" << h.value_dim;
    }
  EXPECT_EQ(instance_of(Family::hopper, Loader::any16, 256, 264, 1), nullptr);
}

TEST(Instances, AreInOrder) {
  for (std::size_t i = 1; i < std::size(kInstances); ++i) {
    const Instance &a = kInstances[i - 1], &b = kInstances[i];
    if (a.family != b.family || a.loader != b.loader) continue;
    const auto order = [](const Instance& x) { return std::tuple(x.value_dim, x.dim, x.rows); };
    EXPECT_LT(order(a), order(b)) << i;
  }
}

}  // namespace
}  // namespace longspan::kernels::cuda
