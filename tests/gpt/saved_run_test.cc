// --save and --resume: a run that was stopped, or killed, goes on to the bits of one that was not.
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "program.h"
#include "scratch_files.h"

namespace ebb::gpt {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class SavedRunTest : public testing::Test {
 protected:
  std::vector<std::string> Command(std::vector<std::string> more,
                                   const std::string& steps = "40") const {
    std::vector<std::string> all = {
        "--data", data_,      "--steps", steps,       "--ranks",
        "2",      "--sample", "0",       "--summary", files_.Path("s.json")};
    all.insert(all.end(), more.begin(), more.end());
    return Tiny(all);
  }
  std::string Digest() const {
    return nlohmann::json::parse(files_.Read("s.json"))["parameter_digest"].get<std::string>();
  }
  std::string UnbrokenDigest() const {
    Program program(Command({}));
    EXPECT_EQ(program.Finish(), 0) << program.printed();
    return Digest();
  }

  ScratchFiles files_;
  const std::string data_ = files_.Write("text", std::string(200, 'a') + std::string(200, 'b'));
  const std::string saves_ = files_.Path("saves");
};

// At one learning rate, so that the number of steps may be settled later.
TEST_F(SavedRunTest, ASignalSavesAndTheSameCommandGoesOn) {
  const std::string config = files_.Write(
      "c.json",
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": true}})");
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    fs::remove_all(saves_);
    const auto command = [&](const std::string& steps) {
      return Command({"--config", config, "--save", saves_, "--resume", "latest"}, steps);
    };
    Program first(command("100000000"));
    ASSERT_TRUE(first.WaitFor("step 1/")) << first.printed();
    first.Signal(signal);
    EXPECT_EQ(first.Finish(), 75) << first.printed();
    EXPECT_THAT(first.printed(), HasSubstr("saved " + saves_ + "/step-"));
    const int64_t stopped = nlohmann::json::parse(files_.Read("s.json"))["steps"].get<int64_t>();
    const std::string steps = std::to_string(stopped + 5);
    Program second(command(steps));
    EXPECT_EQ(second.Finish(), 0) << second.printed();
    EXPECT_THAT(second.printed(), HasSubstr("after step " + std::to_string(stopped)));
    const std::string resumed = Digest();
    Program unbroken(Command({"--config", config}, steps));
    EXPECT_EQ(unbroken.Finish(), 0) << unbroken.printed();
    EXPECT_EQ(Digest(), resumed);
  }
}

TEST_F(SavedRunTest, AKilledRunGoesOnFromItsLastSave) {
  const std::string expected = UnbrokenDigest();
  const std::vector<std::string> command =
      Command({"--save", saves_, "--save-every", "2", "--keep", "1", "--resume", "latest"});
  for (const char* at : {"step 3/", "saved", "step 20/"}) {
    Program killed(command);
    killed.WaitFor(at);
    killed.Signal(SIGKILL);
    killed.Finish();
  }
  Program last(command);
  EXPECT_EQ(last.Finish(), 0) << last.printed();
  EXPECT_EQ(Digest(), expected);
  // The lock, the pointer and one checkpoint.
  EXPECT_EQ(std::distance(fs::directory_iterator(saves_), fs::directory_iterator()), 3);
}

TEST_F(SavedRunTest, ACheckpointIsResumedByItsOwnName) {
  Program saver(Command({"--save", saves_, "--save-every", "10", "--keep", "0"}));
  ASSERT_EQ(saver.Finish(), 0) << saver.printed();
  const std::string expected = Digest();
  for (const char* step : {"10", "20", "30", "40"}) {
    Program program(Command({"--resume", saves_ + "/step-0000000" + step}));
    EXPECT_EQ(program.Finish(), 0) << program.printed();
    EXPECT_THAT(program.printed(), HasSubstr(std::string("after step ") + step));
    EXPECT_EQ(Digest(), expected);
  }
}

TEST_F(SavedRunTest, WhatCannotBeResumedIsRefused) {
  const auto refused = [&](std::vector<std::string> more) {
    Program program(Command(std::move(more)));
    EXPECT_EQ(program.Finish(), 2) << program.printed();
    return program.printed();
  };
  EXPECT_THAT(refused({"--resume", "latest"}), HasSubstr("requires --save"));
  EXPECT_THAT(refused({"--save-every", "2"}), HasSubstr("--save"));
  EXPECT_THAT(refused({"--resume", files_.Path("nothing")}), HasSubstr(files_.Path("nothing")));
  Program saver(Command({"--save", saves_}, "2"));
  ASSERT_EQ(saver.Finish(), 0) << saver.printed();
  EXPECT_THAT(refused({"--resume", saves_, "--layers", "3"}), HasSubstr("it lacks the parameter"));
}

}  // namespace
}  // namespace ebb::gpt
