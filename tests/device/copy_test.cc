#include "ebb/runtime/device/cpu/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ebb {
namespace {

std::vector<std::byte> Numbered(size_t bytes, size_t first) {
  std::vector<std::byte> values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((first + i) * 151 >> 3);
  return values;
}

TEST(CopyBytesInStep, CopiesTheGivenBytesOnly) {
  constexpr size_t kAround = 64;
  const std::vector<std::byte> around(kAround, std::byte{0xa5});
  // Parts of a piece and several pieces, whole cache lines or not, in the caches and past them.
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{262'144}, size_t{1'000'003}}) {
    for (const int64_t together : {int64_t{0}, kStreamingCopyBytes}) {
      for (const int threads : {1, 3}) {
        SCOPED_TRACE(::testing::Message()
                     << bytes << " bytes of " << together << ", " << threads << " threads");
        ThreadTeam team(threads);
        std::vector<std::vector<std::byte>> sources, destinations;
        std::vector<CopyEnds> copies;
        for (const size_t skew : {size_t{0}, size_t{1}, size_t{13}}) {
          sources.push_back(Numbered(bytes + skew, 1000 * skew));
          destinations.emplace_back(kAround + skew + bytes + kAround, std::byte{0xa5});
        }
        for (size_t i = 0; i < sources.size(); ++i) {
          const size_t skew = sources[i].size() - bytes;
          copies.push_back({.destination = destinations[i].data() + kAround + skew,
                            .source = sources[i].data() + skew});
        }
        // A rank's own block that is already in place.
        std::vector<std::byte> in_place = Numbered(bytes, 5);
        copies.insert(copies.begin() + 1,
                      {.destination = in_place.data(), .source = in_place.data()});

        CopyBytesInStep(team, copies, static_cast<int64_t>(bytes), together);

        EXPECT_EQ(in_place, Numbered(bytes, 5));
        for (size_t i = 0; i < sources.size(); ++i) {
          const size_t skew = sources[i].size() - bytes;
          std::vector<std::byte> expected(kAround + skew, std::byte{0xa5});
          expected.insert(expected.end(), sources[i].begin() + static_cast<std::ptrdiff_t>(skew),
                          sources[i].end());
          expected.insert(expected.end(), around.begin(), around.end());
          EXPECT_TRUE(destinations[i] == expected) << "copy " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ebb
