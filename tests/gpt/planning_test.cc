// Output of the program about a plan, without training: gpt --show-plan and --predict.
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "program.h"
#include "scratch_files.h"

namespace ebb::gpt::planning_test {
namespace {

using testing::HasSubstr;

class PlanningTest : public testing::Test {
 protected:
  ScratchFiles files_;
  const std::string data_ = files_.Write("text", std::string(400, 'a'));
};

// There are neither data nor a folder for swap files, and no machine holds the model.
TEST_F(PlanningTest, ShowPlanAloneNeedsNothingButTheModel) {
  const std::vector<std::string> huge = {"--layers", "4",
                                         "--width",  "65536",
                                         "--heads",  "64",
                                         "--data",   files_.Path("absent"),
                                         "--losses", files_.Path("no/losses.csv")};
  for (const auto& [given, operations] :
       {std::pair("--show-plan", false), std::pair("--show-plan=operations", true)}) {
    std::vector<std::string> arguments = huge;
    arguments.insert(arguments.end(), {given, "--offload-param", "nvme", "--offload-optimizer",
                                       "nvme", "--nvme-path", files_.Path("none")});
    Program program(arguments);
    program.ExitsWith(0);
    const std::string& printed = program.printed();
    EXPECT_THAT(printed, testing::ContainsRegex("Memory of a rank\n.*predicted MiB\n"));
    EXPECT_THAT(printed, testing::ContainsRegex("optimizer +nvme +[0-9]+"));
    EXPECT_THAT(printed, HasSubstr("Traffic of a step"));
    EXPECT_THAT(printed, HasSubstr("Communication of a rank in a step"));
    EXPECT_THAT(printed, testing::Not(HasSubstr("tokens/s")));
    EXPECT_THAT(printed, testing::ContainsRegex("Plan of a step: .*updates [a-z]+ \\(.+\\)\n"));
    EXPECT_EQ(printed.find("F forward, B backward") != std::string::npos, operations);
    if (operations) {
      for (const char* said : {"gather", "reduce", "block0"}) EXPECT_THAT(printed, HasSubstr(said));
      EXPECT_LT(printed.find("Memory of a rank"), printed.find("Plan of a step: "));
    }
  }
  EXPECT_EQ(files_.Count(), 1u);
}

// The figures that an engine counts, for the run asked for; and a row for each stage and tier.
TEST_F(PlanningTest, PredictsTheMemoryOfTraining) {
  const std::string disk = files_.Folder("disk");
  for (const auto& choice : std::vector<std::vector<std::string>>{
           {"--stage", "1"},
           {"--stage", "3", "--offload-optimizer", "cpu"},
           {"--stage", "3", "--offload-param", "nvme", "--offload-optimizer", "nvme"}}) {
    std::vector<std::string> arguments = choice;
    arguments.insert(arguments.end(), {"--data", data_, "--nvme-path", disk});
    std::vector<std::string> trains = arguments;
    trains.insert(trains.end(),
                  {"--steps", "3", "--sample", "0", "--summary", files_.Path("s.json")});
    Program(Tiny(trains)).ExitsWith(0);
    std::map<std::string, double> held;
    const auto summary = nlohmann::json::parse(files_.Read("s.json"));
    for (const auto& row : summary["memory"])
      held[row["tier"]] += row["predicted_bytes"].get<double>() / (1 << 20);

    arguments.push_back("--predict");
    Program program(Tiny(arguments));
    program.ExitsWith(0);
    std::istringstream lines(program.printed());
    int rows = 0, marked = 0;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line[0] == '*' ? line.substr(1) : line);
      int stage = -1;
      std::string parameters, states;
      double device = 0, ram = 0, nvme = 0;
      if (!(words >> stage >> parameters >> states >> device >> ram >> nvme)) continue;
      ++rows;
      if (line[0] != '*') continue;
      ++marked;
      EXPECT_EQ(stage, summary["config"]["zero_optimization"]["stage"]);
      EXPECT_NEAR(device, held["device"], 0.051);
      EXPECT_NEAR(ram, held["cpu"], 0.051);
      EXPECT_NEAR(nvme, held["nvme"], 0.051);
    }
    EXPECT_EQ(rows, 1 + 3 + 3 + 9) << program.printed();
    EXPECT_EQ(marked, 1) << program.printed();
  }
}

TEST_F(PlanningTest, PredictsConfigsAboveACapAndRefusesImpossibleOnes) {
  Program capped(Tiny({"--predict", "--dtype", "fp32", "--device-memory", "1140KiB"}));
  EXPECT_THAT(capped.ExitsWith(0),
              testing::ContainsRegex("0      device      device    ebb.device_memory is "
                                     "[0-9.]+ MiB a rank, but the pools on the device need "
                                     "[0-9.]+ MiB\n"));
  EXPECT_THAT(capped.printed(), testing::ContainsRegex("3      nvme        nvme +[0-9.]+ +[0-9]"));
  EXPECT_THAT(Program(Tiny({"--predict", "--device-memory", "20KiB"})).ExitsWith(2),
              HasSubstr("gpt: ebb.device_memory is 20.0 KiB a rank"));
}

}  // namespace
}  // namespace ebb::gpt::planning_test
