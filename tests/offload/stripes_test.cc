// Striping is a bijection between the file and its stripes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ebb/offload/transfers.h"

namespace ebb::stripes_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(StripesTest, EveryByteHasOnePlaceAndEveryFileIsFull) {
  for (const int files : {1, 2, 3, 5}) {
    for (const int64_t block : {4096L, 12288L, kMiB, 3 * kMiB}) {
      for (const int64_t bytes : {int64_t{0}, int64_t{4096}, kMiB, 7 * kMiB + 8192, 40 * kMiB}) {
        SCOPED_TRACE(::testing::Message() << files << " files, " << block << ", " << bytes);
        const Stripes stripes(files, bytes, block);
        std::vector<int64_t> filled(static_cast<size_t>(files));
        for (int64_t offset = 0; offset < bytes;) {
          const Stripes::Place place = stripes.PlaceOf(offset);
          // In ascending order a file is filled without gaps.
          ASSERT_EQ(place.offset, filled[static_cast<size_t>(place.file)]);
          const int64_t part = std::min(place.bytes, bytes - offset);
          ASSERT_GT(part, 0);
          filled[static_cast<size_t>(place.file)] += part;
          offset += part;
        }
        for (int file = 0; file < files; ++file) {
          EXPECT_EQ(stripes.FileBytes(file), filled[static_cast<size_t>(file)]);
        }
      }
    }
  }
}

TEST(StripesTest, JoinedFilesLieEndToEnd) {
  const int64_t sizes[] = {8192, 0, 4096};
  const Stripes joined = Stripes::Joined(sizes);
  EXPECT_EQ(joined.bytes(), 12288);
  for (const auto& [offset, file, in_file, bytes] :
       {std::array<int64_t, 4>{0, 0, 0, 8192}, {4096, 0, 4096, 4096}, {8192, 2, 0, 4096}}) {
    const Stripes::Place place = joined.PlaceOf(offset);
    EXPECT_EQ(place.file, file) << offset;
    EXPECT_EQ(place.offset, in_file) << offset;
    EXPECT_EQ(place.bytes, bytes) << offset;
  }
  EXPECT_EQ(joined.FileBytes(1), 0);
  EXPECT_EQ(joined.FileBytes(2), 4096);
}

TEST(StripesTest, PlacesWithinAUnitFollowEachOther) {
  const Stripes stripes(3, 30 * kMiB, 4096);
  const Stripes::Place unit = stripes.PlaceOf(4 * kMiB);
  const Stripes::Place within = stripes.PlaceOf(4 * kMiB + 8192);
  EXPECT_EQ(within.file, unit.file);
  EXPECT_EQ(within.offset, unit.offset + 8192);
  EXPECT_EQ(within.bytes, unit.bytes - 8192);
}

}  // namespace
}  // namespace ebb::stripes_test
