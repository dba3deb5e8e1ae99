// manifest.json describes a checkpoint. It is written last. So a folder with a manifest is
// complete, unless it was changed later. Checksums show that: the manifest has those of the files'
// headers and of each slice, and the headers have those of the slices' blocks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/engine/training_state.h"
#include "ebb/sharding/model.h"

namespace ebb {

// The newest version that is read. 2 has no parameters that are cut over tensor ranks, and 1 no
// states in blocks either. The oldest version that can say what there is is written.
inline constexpr int kCheckpointVersion = 3;
inline constexpr int64_t kManifestBytesMax = int64_t{1} << 26;
inline constexpr char kManifestName[] = "manifest.json";

struct Manifest {
  struct Parameter {
    std::string name;
    std::vector<int64_t> shape = {};
    bool trainable = true;
    std::string group = {};
    DType dtype{};                         // of the values
    std::vector<std::string> states = {};  // names of the optimizer states
    // The tensor ranks of the run that saved, if the parameter was cut over them, and how. Slices
    // are then of the blocks, by the name of BlockName. `shape` is the whole one.
    int blocks = 1;
    Split split = {};
    friend bool operator==(const Parameter&, const Parameter&) = default;
  };
  struct File {  // by rank, RankFileName
    int64_t bytes = 0;
    uint64_t header_checksum = 0;
    // By tensor, in the order of the header: a checksum of the text with the checksums of its
    // blocks. Empty: an older version's.
    std::vector<uint64_t> slice_checksums = {};
    friend bool operator==(const File&, const File&) = default;
  };

  TrainingState state = {};
  // Ranks that summed their gradients first: the order of the sums. 0: an older version's, or an
  // import.
  int64_t reduction_group = 0;
  std::string run = {};     // Engine::run; empty: an older version's, or an import
  std::string config = {};  // the resolved configuration, JSON
  // By name of the state: the Name of its encoding, for states in blocks. A parameter may have
  // numbers all the same.
  std::map<std::string, std::string> state_encodings = {};
  std::vector<Parameter> parameters = {};
  std::vector<File> files = {};
  std::map<std::string, std::string> trainer = {};  // its own named bytes, rank 0's for all ranks
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// A checksum as 16 hexadecimal digits, and the reverse. Other digits than such a text has are
// nothing, so that each changed bit shows.
std::string ChecksumText(uint64_t checksum);
std::optional<uint64_t> ParseChecksum(std::string_view text);

std::string ToText(const Manifest& manifest);
// `text` is untrusted. `path` is for messages. kDataLoss: damaged. kFailedPrecondition: another
// version's.
absl::StatusOr<Manifest> ParseManifest(const std::string& text, const std::string& path);
bool HasManifest(const std::string& folder);
// Reads the manifest of a checkpoint's folder. kNotFound: it has none.
absl::StatusOr<Manifest> ReadManifest(const std::string& folder);

}  // namespace ebb
