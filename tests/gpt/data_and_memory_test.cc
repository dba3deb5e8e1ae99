// The program with data that never ends or is larger than memory, and with too little memory.
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "program.h"
#include "scratch_files.h"

namespace ebb::gpt::data_and_memory_test {
namespace {

using testing::HasSubstr;

class DataAndMemoryTest : public testing::Test {
 protected:
  ScratchFiles files_;
  const std::string data_ = files_.Write("text", std::string(400, 'a'));
};

TEST_F(DataAndMemoryTest, DataThatNeverEndsIsRefused) {
  EXPECT_THAT(Program(Tiny({"--data", "/dev/zero"})).ExitsWith(2),
              HasSubstr("/dev/zero: is a device"));

  if (!kCanLimitAddressSpace) GTEST_SKIP() << "a pipe's limit may be a GiB";
  const std::string pipe = files_.Path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  Program::Options options = WithAddressSpace(700'000);
  options.before[2].insert(0, "yes > " + pipe + " & ");
  EXPECT_THAT(Program(Tiny({"--data", pipe}), options).ExitsWith(2),
              testing::AllOf(HasSubstr(pipe), HasSubstr("write it to a file")));
}

// Address space runs out at some point between the start and the first step; the last run has
// enough. oneDNN itself crashes if it lacks memory.
TEST_F(DataAndMemoryTest, ARunWithoutMemoryIsRefusedWithAMessage) {
  if (!kCanLimitAddressSpace) GTEST_SKIP();
  int trained = 0, refused = 0;
  for (int64_t kibibytes = 140'000; trained == 0; kibibytes += 20'000) {
    ASSERT_LT(kibibytes, 4'000'000);
    Program program(
        Tiny({"--data", data_, "--steps", "2", "--ranks", "1", "--threads", "1", "--sample", "0"}),
        WithAddressSpace(kibibytes));
    const int code = program.Finish();
    SCOPED_TRACE(std::to_string(kibibytes) + " KiB:\n" + program.printed());
    // Before main the program's loader may lack memory for the libraries.
    if (code == 127 && program.printed().find("shared object") != std::string::npos) continue;
    if (code == 0) {
      ++trained;
      continue;
    }
    ++refused;
    EXPECT_EQ(code, 2);
    EXPECT_THAT(program.printed(),
                testing::ContainsRegex("gpt: .*ulimit -v, now " + std::to_string(kibibytes)));
  }
  EXPECT_GT(refused, 0);
}

// A file that is larger than the address space.
TEST_F(DataAndMemoryTest, TrainsOnDataLargerThanMemory) {
  if (!kCanLimitAddressSpace) GTEST_SKIP();
  const std::string large = files_.Write("large", "");
  std::filesystem::resize_file(large, int64_t{1} << 36);
  Program(
      Tiny({"--data", large, "--steps", "2", "--sample", "0", "--threads", "1", "--ranks", "1"}),
      WithAddressSpace(4'000'000))
      .ExitsWith(0);
}

}  // namespace
}  // namespace ebb::gpt::data_and_memory_test
