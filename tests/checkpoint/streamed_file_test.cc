// A file of any size holds the appended bytes, through every way to the disk, and reading ahead
// returns those bytes.
#include "ebb/runtime/checkpoint/streamed_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/read_ahead.h"
#include "tests/offload/limited.h"
#include "tests/offload/scratch.h"
#include "tests/status.h"

namespace ebb::testing::streamed_file_test {
namespace {

constexpr int64_t kSlot = int64_t{4} << 20;

struct Way {
  const char* name;
  IoBackend backend;
  bool in_memory;  // a file system of RAM
};
void PrintTo(const Way& way, std::ostream* out) {
  *out << way.name;
}

class StreamedFileTest : public ::testing::TestWithParam<Way> {
 protected:
  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  static std::vector<std::byte> Bytes(int64_t count) {
    std::vector<std::byte> bytes(static_cast<size_t>(count));
    FillRandomly(bytes, static_cast<uint64_t>(count));
    return bytes;
  }
  // In pieces of up to 3 MiB.
  void Write(const std::string& path, int64_t begin, std::span<const std::byte> data) {
    ASSERT_OK_AND_ASSIGN(auto file, StreamedFile::Create(path, GetParam().backend));
    file.Expect(begin, begin + std::ssize(data));
    std::mt19937 random(static_cast<unsigned>(data.size()));
    while (!data.empty()) {
      const size_t piece = std::min<size_t>(data.size(), 1 + random() % (3 << 20));
      ASSERT_TRUE(file.Append(data.first(piece)).ok());
      data = data.subspan(piece);
    }
    const std::vector<std::byte> prefix = Bytes(begin);
    ASSERT_TRUE(file.WriteAt(0, prefix).ok());
    ASSERT_TRUE(file.Sync().ok());
  }

  const Scratch scratch_ = GetParam().in_memory ? Scratch("/dev/shm") : Scratch();
};

INSTANTIATE_TEST_SUITE_P(Ways, StreamedFileTest,
                         ::testing::Values(Way{"any", IoBackend::kAuto, false},
                                           Way{"threads", IoBackend::kThreads, false},
                                           Way{"in_memory", IoBackend::kAuto, true}),
                         [](const auto& of) { return std::string(of.param.name); });

TEST_P(StreamedFileTest, HoldsTheAppendedBytes) {
  for (const int64_t begin : {int64_t{0}, int64_t{4096}, int64_t{12288}}) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{4096}, kSlot - 1,
                                kSlot, kSlot + 1, 2 * kSlot + 4097, 10 * kSlot, 11 * kSlot + 5}) {
      SCOPED_TRACE(::testing::Message() << bytes << " bytes from " << begin);
      const std::string path = Path("file");
      std::filesystem::remove(path);
      const std::vector<std::byte> data = Bytes(bytes);
      Write(path, begin, data);
      ASSERT_EQ(static_cast<int64_t>(std::filesystem::file_size(path)), begin + bytes);
      ASSERT_OK_AND_ASSIGN(auto file, OpenToRead(path));
      std::vector<std::byte> prefix(static_cast<size_t>(begin)), found(data.size());
      ASSERT_TRUE(ReadAt(file.get(), path, 0, prefix).ok());
      EXPECT_TRUE(prefix == Bytes(begin));
      ASSERT_TRUE(ReadAt(file.get(), path, begin, found).ok());
      EXPECT_TRUE(found == data);
    }
  }
}

TEST_P(StreamedFileTest, IsReadAheadInAnyOrder) {
  const std::vector<int64_t> sizes = {3 * kSlot + 777, 5, 9 * kSlot};
  std::vector<std::string> paths;
  std::vector<std::vector<std::byte>> data;
  for (size_t i = 0; i < sizes.size(); ++i) {
    paths.push_back(Path(std::to_string(i)));
    data.push_back(Bytes(sizes[i]));
    Write(paths[i], 0, data[i]);
  }
  std::mt19937 random(1);
  std::vector<ReadAhead::Range> ranges;
  for (int i = 0; i < 60; ++i) {
    const auto file = static_cast<int>(random() % sizes.size());
    const int64_t size = sizes[static_cast<size_t>(file)];
    const auto at = static_cast<int64_t>(random() % static_cast<uint64_t>(size));
    const int64_t most = std::min(ReadAhead::kRangeMax, size - at);
    const int64_t bytes =
        i % 3 == 0 ? most : 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    ranges.push_back({.file = file, .at = at, .bytes = bytes});
  }
  ASSERT_OK_AND_ASSIGN(auto ahead, ReadAhead::Open(paths, ranges, GetParam().backend));
  for (const auto& [file, at, bytes] : ranges) {
    ASSERT_OK_AND_ASSIGN(const auto shown, ahead->Next());
    EXPECT_TRUE(std::ranges::equal(
        shown, std::span(data[static_cast<size_t>(file)])
                   .subspan(static_cast<size_t>(at), static_cast<size_t>(bytes))));
  }
}

TEST_P(StreamedFileTest, NoFileToReadAheadIsAnError) {
  EXPECT_EQ(ReadAhead::Open({}, {}, GetParam().backend).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(StreamedFileTest, AnErrorOfAReadNamesTheFile) {
  Write(Path("short"), 0, Bytes(2 * kSlot));
  ASSERT_OK_AND_ASSIGN(auto ahead, ReadAhead::Open({Path("short")},
                                                   {{.file = 0, .at = 0, .bytes = kSlot},
                                                    {.file = 0, .at = 2 * kSlot - 10, .bytes = 20}},
                                                   GetParam().backend));
  EXPECT_TRUE(ahead->Next().ok());
  const absl::Status cut = ahead->Next().status();
  EXPECT_TRUE(absl::IsDataLoss(cut)) << cut;
  EXPECT_NE(cut.message().find("short' ends at byte"), std::string::npos) << cut;
}

// The limit of the file size acts like a full disk.
TEST_P(StreamedFileTest, SpaceThatIsNotThereIsAnErrorBeforeAByteIsWritten) {
  const FullDisk full(1 << 20);
  auto file = StreamedFile::Create(Path("large"), GetParam().backend);
  file->Expect(0, 2 << 20);
  const absl::Status reserved = file->Append(Bytes(1));
  EXPECT_FALSE(reserved.ok());
  EXPECT_NE(reserved.message().find("reserving 2097152 bytes for '" + Path("large")),
            std::string::npos)
      << reserved;
}

}  // namespace
}  // namespace ebb::testing::streamed_file_test
