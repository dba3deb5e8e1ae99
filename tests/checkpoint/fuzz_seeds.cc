// Writes the first inputs of fuzz_readers.cc into a folder, a few for each reader:   fuzz_seeds DIR
#include <fstream>
#include <string>

#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/safetensors.h"

int main(int argc, char** argv) {
  using namespace ebb;
  if (argc != 2) return 2;
  int written = 0;
  const auto write = [&](char reader, const std::string& bytes) {
    std::ofstream(std::string(argv[1]) + "/seed" + std::to_string(written++), std::ios::binary)
        << reader << bytes;
  };
  SafetensorsHeader header;
  header.tensors = {{.name = "master/a@0:3", .dtype = "F32", .shape = {3}, .begin = 0, .end = 12},
                    {.name = "b", .dtype = "BF16", .shape = {2, 5}, .begin = 12, .end = 32}};
  header.metadata = {{"format", "pt"}};
  write(0, SafetensorsPrefix(header, 8).substr(8));
  write(1,
        ToText({.state = {.finished_steps = 12, .applied_steps = 10, .skipped_steps = 2},
                .config = "{}",
                .parameters = {{.name = "w", .shape = {3, 4}, .group = "g", .states = {"exp_avg"}}},
                .files = {{.bytes = 5000, .header_checksum = 7}},
                .trainer = {{"place", "abc"}}}));
  write(
      2,
      R"({"metadata": {"total_size": 9}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})");
  return 0;
}
