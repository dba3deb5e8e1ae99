// A fuzz target in libFuzzer's form: fuzz.sh builds it with clang and the sanitizers,
// garbage_test.cc drives it over mutated files of the corpus.
#pragma once

#include <cstddef>
#include <cstdint>

// Reads `data` as a configuration, as a file and beside a trainer. Aborts if a law is broken: an
// error is kInvalidArgument with a message of bounded length in UTF-8; an accepted configuration is
// valid, can be explained, and can be written and read again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
