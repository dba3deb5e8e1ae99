#include "peer_run.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ebb::bench {
namespace {

// A file of the model's shapes. The destructor removes it.
class UnitsFile {
 public:
  explicit UnitsFile(const planner::Model& model) {
    nlohmann::json units = nlohmann::json::array();
    for (const planner::ModelUnit& unit : model.units) {
      nlohmann::json shapes = nlohmann::json::array();
      for (const planner::ModelTensor& tensor : unit.tensors) shapes.push_back(tensor.shape);
      units.push_back(shapes);
    }
    const std::string text = units.dump();
    const int file = mkstemp(path_.data());
    written_ = file >= 0 && write(file, text.data(), text.size()) == std::ssize(text);
    if (file >= 0) close(file);
  }
  ~UnitsFile() { unlink(path_.c_str()); }
  UnitsFile(const UnitsFile&) = delete;
  UnitsFile& operator=(const UnitsFile&) = delete;
  const std::string& path() const { return path_; }
  bool written() const { return written_; }

 private:
  std::string path_ = "/tmp/footprint-XXXXXX";
  bool written_ = false;
};

}  // namespace

absl::StatusOr<PeerRun> MeasurePeer(const std::string& python, const std::string& kind, int world,
                                    const planner::Model& model, const std::string& disk,
                                    int steps) {
  const UnitsFile units(model);
  if (!units.written()) return absl::InternalError("the model's shapes cannot be written to /tmp");
  const std::string command = absl::StrCat(
      "timeout 600 '", python, "' '" EBB_FOOTPRINT_PEERS "' --kind ", kind, " --world ", world,
      " --steps ", steps, " --units ", units.path(), " --disk '", disk, "' 2>&1");
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return absl::InternalError("cannot start a peer's process");
  std::string last, line;
  char bytes[4096];
  nlohmann::json numbers;
  while (std::fgets(bytes, sizeof(bytes), pipe) != nullptr) {
    line = bytes;
    if (line.starts_with("{\"peak\"")) {
      numbers = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    } else if (line != "\n") {
      last = line.substr(0, line.find('\n'));
    }
  }
  const int status = pclose(pipe);
  if (status != 0 || !numbers.is_object())
    return absl::UnavailableError(last.empty() ? "it has not ended in ten minutes" : last);
  return PeerRun{.peak = numbers["peak"].get<int64_t>(), .idle = numbers["idle"].get<int64_t>()};
}

}  // namespace ebb::bench
