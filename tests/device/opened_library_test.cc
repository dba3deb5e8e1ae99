#include "ebb/runtime/device/opened_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/status.h"

// Found in the program, like the function of a linked library.
extern "C" int EbbTestProgramVersion() {
  return 21802;
}
extern "C" int EbbTestProgramSquare(int x) {
  return x * x;
}

namespace ebb::testing::opened_library_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

LibraryVersion AskVersion(void* function) {
  const int code = reinterpret_cast<int (*)()>(function)();
  return {code / 10000, code / 100 % 100, code % 100};
}

WantedLibrary Wanted(const char* file) {
  return {.name = "Squares",
          .file = file,
          .needed_for = "areas",
          .instead = "use circles",
          .oldest = {.major = 2, .minor = 18, .patch = 0},
          .version_function = "EbbTestVersion",
          .version = &AskVersion};
}

std::string Refusal(const WantedLibrary& wanted) {
  const auto library = OpenedLibrary::Open(wanted);
  EXPECT_EQ(library.status().code(), absl::StatusCode::kUnavailable);
  return std::string(library.status().message());
}

TEST(OpenedLibrary, IsOpenedByNameAndItsFunctionsAreFound) {
  ASSERT_OK_AND_ASSIGN(const auto library, OpenedLibrary::Open(Wanted(EBB_TEST_WANTED)));
  EXPECT_EQ(library.version(), (LibraryVersion{2, 19, 1}));
  EXPECT_EQ(library.description(), "Squares 2.19.1 (" EBB_TEST_WANTED ")");
  int (*square)(int) = nullptr;
  ASSERT_TRUE(library.Find("EbbTestSquare", square).ok());
  EXPECT_EQ(square(7), 49);
}

TEST(OpenedLibrary, TheProgramsOwnLibraryComesFirst) {
  WantedLibrary wanted = Wanted("no such file");
  wanted.version_function = "EbbTestProgramVersion";
  ASSERT_OK_AND_ASSIGN(const auto library, OpenedLibrary::Open(wanted));
  EXPECT_EQ(library.version(), (LibraryVersion{2, 18, 2}));
  int (*square)(int) = nullptr;
  ASSERT_TRUE(library.Find("EbbTestProgramSquare", square).ok());
  EXPECT_EQ(square, &EbbTestProgramSquare);
}

TEST(OpenedLibrary, AMissingLibraryIsNamedWithARemedy) {
  EXPECT_THAT(Refusal(Wanted("libebb_no_such_library.so.2")),
              AllOf(HasSubstr("areas need Squares, which cannot be opened"),
                    HasSubstr("libebb_no_such_library.so.2: cannot open shared object file"),
                    HasSubstr("install Squares 2 from 2.18.0 on"), HasSubstr("LD_LIBRARY_PATH"),
                    HasSubstr("or use circles")));
}

TEST(OpenedLibrary, AnOldLibraryIsRefused) {
  EXPECT_THAT(Refusal(Wanted(EBB_TEST_OLD)),
              AllOf(HasSubstr("areas cannot use Squares 2.17.4 (" EBB_TEST_OLD ")"),
                    HasSubstr("install Squares 2 from 2.18.0 on")));
}

TEST(OpenedLibrary, TheNextMajorVersionIsRefused) {
  EXPECT_THAT(Refusal(Wanted(EBB_TEST_NEXT)), HasSubstr("areas cannot use Squares 3.0.0"));
}

TEST(OpenedLibrary, TheProgramsOwnLibraryIsRefusedWithOtherAdvice) {
  WantedLibrary wanted = Wanted(EBB_TEST_WANTED);
  wanted.version_function = "EbbTestProgramVersion";
  wanted.oldest = {.major = 2, .minor = 18, .patch = 3};
  EXPECT_THAT(Refusal(wanted),
              AllOf(HasSubstr("areas cannot use Squares 2.18.2"), HasSubstr("opened_library_test)"),
                    HasSubstr("linked or loaded"), HasSubstr("Squares 2 from 2.18.3 on"),
                    Not(HasSubstr("LD_LIBRARY_PATH"))));
}

TEST(OpenedLibrary, AFunctionThatIsMissingIsNamedWithItsLibrary) {
  ASSERT_OK_AND_ASSIGN(const auto library, OpenedLibrary::Open(Wanted(EBB_TEST_LACKING)));
  int (*square)(int) = nullptr;
  const absl::Status found = library.Find("EbbTestSquare", square);
  EXPECT_THAT(found, StatusIs(absl::StatusCode::kUnavailable,
                              "Squares 2.19.1 (" EBB_TEST_LACKING ") has no EbbTestSquare",
                              "install Squares 2 from 2.18.0 on"));
  library.FindIfThere("EbbTestSquare", square);
  EXPECT_EQ(square, nullptr);
}

TEST(OpenedLibrary, AFileThatIsNotTheLibraryIsRefused) {
  WantedLibrary wanted = Wanted(EBB_TEST_WANTED);
  wanted.version_function = "EbbTestOtherVersion";
  EXPECT_THAT(Refusal(wanted),
              HasSubstr("Squares (" EBB_TEST_WANTED ") has no EbbTestOtherVersion"));
}

}  // namespace
}  // namespace ebb::testing::opened_library_test
