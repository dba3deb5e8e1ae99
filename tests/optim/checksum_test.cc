#include "ebb/optim/checksum.h"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "every_target.h"

namespace ebb::optim::checksum_test {
namespace {

std::vector<std::byte> RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::span<const std::byte> First(const std::vector<std::byte>& bytes, size_t count) {
  return std::span(bytes).first(count);
}

const size_t kSizes[] = {0,    1,    7,    8,     63,    64,    65,     1024,
                         4095, 4096, 4097, 65535, 65536, 65537, 300'007};

// The definition, one word at a time.
uint64_t Reference(std::span<const std::byte> bytes) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  uint64_t keys[8];
  for (uint64_t i = 0; i < 8; ++i) keys[i] = mix((i + 1) * 0x9e3779b97f4a7c15u);
  uint64_t sum = mix(bytes.size());
  for (size_t begin = 0; begin < bytes.size(); begin += 65536) {
    const auto block = bytes.subspan(begin, std::min<size_t>(65536, bytes.size() - begin));
    uint64_t lanes[8];
    std::copy_n(keys, 8, lanes);
    for (size_t stripe = 0; stripe * 64 < block.size(); ++stripe) {
      for (size_t lane = 0; lane < 8; ++lane) {
        uint64_t word = 0;
        for (size_t byte = 0; byte < 8; ++byte) {
          const size_t at = stripe * 64 + lane * 8 + byte;
          if (at < block.size()) word |= static_cast<uint64_t>(block[at]) << (8 * byte);
        }
        lanes[lane] = std::rotl(lanes[lane] + word, 29);
      }
      if (stripe % 64 < 63 || (stripe + 1) * 64 > block.size()) continue;
      for (size_t lane = 0; lane < 8; ++lane) {
        lanes[lane] = (lanes[lane] ^ (lanes[lane] >> 47) ^ keys[lane]) * 0x9E3779B1u;
      }
    }
    uint64_t block_sum = mix(block.size());
    for (const uint64_t lane : lanes) block_sum = mix(block_sum ^ lane);
    sum = mix(sum ^ block_sum);
  }
  return sum;
}

TEST(ChecksumTest, EveryTargetAndTeamGivesTheSame) {
  const std::vector<std::byte> bytes = RandomBytes(300'007 + 1, 1);
  for (const size_t size : kSizes) {
    // True also if nothing is aligned.
    for (const size_t begin : {0, 1}) {
      const auto part = std::span<const std::byte>(bytes).subspan(begin, size);
      const uint64_t expected = Reference(part);
      ForEveryTarget([&] {
        EXPECT_EQ(Checksum(part), expected) << size;
        std::vector<uint64_t> blocks(static_cast<size_t>(ChecksumBlocks(int64_t(size))) + 1, 5);
        for (const int threads : {1, 3}) {
          ThreadTeam team(threads);
          EXPECT_EQ(Checksum(team, part, blocks), expected) << size << ", threads " << threads;
        }
        EXPECT_EQ(blocks.back(), 5u);
      });
    }
  }
}

// Checksums in files must never change.
TEST(ChecksumTest, PiecesOfAnySizeGiveTheWholesChecksum) {
  std::mt19937 random(7);
  RunningChecksum running;
  for (const size_t size : kSizes) {
    const std::vector<std::byte> bytes = RandomBytes(size, size);
    for (const size_t most : {size_t{1000}, size_t{65536}, size_t{200'000}}) {
      for (size_t at = 0; at < size;) {
        const size_t piece = std::min(size - at, 1 + random() % most);
        running.Append(std::span(bytes).subspan(at, piece));
        at += piece;
      }
      EXPECT_EQ(running.Take(), Checksum(bytes)) << size << " bytes, pieces up to " << most;
    }
  }
}

TEST(ChecksumTest, KnownBytesHaveKnownSums) {
  EXPECT_EQ(Checksum({}), 0u);
  std::vector<std::byte> bytes(100'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i + i / 256);
  EXPECT_EQ(Checksum(bytes), Reference(bytes));
  EXPECT_EQ(Checksum(bytes), 0x2e81e0108e249b27u);
}

TEST(ChecksumTest, ShowsEverySingleFlippedBit) {
  for (const size_t size : {1, 8, 60, 64, 1024, 5000}) {
    std::vector<std::byte> bytes = RandomBytes(size, size);
    const uint64_t before = Checksum(bytes);
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      const std::byte flip = static_cast<std::byte>(1 << (bit % 8));
      bytes[bit / 8] ^= flip;
      ASSERT_NE(Checksum(bytes), before) << "bit " << bit << " of " << size << " bytes";
      bytes[bit / 8] ^= flip;
    }
  }
}

// Bits that would cancel in a sum without positions, such as the signs of two numbers.
TEST(ChecksumTest, ShowsTwoFlippedBits) {
  std::vector<std::byte> bytes = RandomBytes(200'000, 3);
  const uint64_t before = Checksum(bytes);
  constexpr uint64_t kSeed = 4;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 2000; ++i) {
    const size_t first = random() % (bytes.size() - 64 * 200);
    const size_t second = first + 64 * (1 + random() % 200);  // of the same lane
    const std::byte flip = i % 2 == 0 ? std::byte{0x80} : static_cast<std::byte>(1 << random() % 8);
    bytes[first] ^= flip;
    bytes[second] ^= flip;
    ASSERT_NE(Checksum(bytes), before) << first << " and " << second;
    bytes[first] ^= flip;
    bytes[second] ^= flip;
  }
}

TEST(ChecksumTest, ShowsSwappedParts) {
  const std::vector<std::byte> bytes = RandomBytes(4 * 65536, 5);
  const uint64_t before = Checksum(bytes);
  for (const size_t length : {8, 64, 1024, 4096, 65536}) {
    for (size_t first = 0; first + 2 * length <= bytes.size(); first += 65536 / 2 + length) {
      auto changed = bytes;
      const auto at = changed.begin() + static_cast<int64_t>(first);
      std::swap_ranges(at, at + static_cast<int64_t>(length), at + static_cast<int64_t>(length));
      EXPECT_NE(Checksum(changed), before) << length << " bytes at " << first;
    }
  }
}

TEST(ChecksumTest, ZerosOfEachLengthHaveAnotherSum) {
  const std::vector<std::byte> zeros(200'000);
  std::set<uint64_t> sums;
  size_t sizes = 0;
  for (size_t size = 0; size < zeros.size(); size += size < 300 ? 1 : 997, ++sizes) {
    sums.insert(Checksum(First(zeros, size)));
  }
  EXPECT_EQ(sums.size(), sizes);
}

// A file that lost its end, which reads as zeros.
TEST(ChecksumTest, ShowsALostEnd) {
  auto bytes = RandomBytes(100'000, 6);
  const uint64_t before = Checksum(bytes);
  for (const size_t kept : {99'999, 98'304, 65'536, 4096, 0}) {
    auto cut = bytes;
    std::fill(cut.begin() + static_cast<int64_t>(kept), cut.end(), std::byte{});
    EXPECT_NE(Checksum(cut), before) << kept;
    EXPECT_NE(Checksum(First(bytes, kept)), before) << kept;
  }
}

}  // namespace
}  // namespace ebb::optim::checksum_test
