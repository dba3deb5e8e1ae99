// ebb-checkpoint as a program: exit statuses, messages about unusable files, and memory. Files that
// other packages read and write: hugging_face_test.py, torch_files_test.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/parameter_names.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/safetensors_writer.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "own_folder.h"
#include "tests/status.h"

namespace ebb::testing::checkpoint_program_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

struct Ended {
  int code = 0;
  std::string printed;  // both streams
};
void PrintTo(const Ended& ended, std::ostream* out) {
  *out << ended.code << " after " << ended.printed.substr(0, 1000);
}

// With this exit status, and all of these texts printed.
template <class... Texts>
auto Ends(int code, const Texts&... texts) {
  return AllOf(::testing::Field(&Ended::code, code),
               ::testing::Field(&Ended::printed, AllOf(HasSubstr(""), HasSubstr(texts)...)));
}

class CheckpointProgramTest : public OwnFolderTest {
 protected:
  CheckpointProgramTest() { fs::create_directories(folder_); }

  std::string Path(const std::string& name) const { return absl::StrCat(folder_, "/", name); }
  // In the test's folder. `before`: shell commands and variables.
  Ended Run(const std::string& arguments, const std::string& before = "") const {
    const std::string command = absl::StrCat("cd '", folder_, "' && ", before,
                                             "'" EBB_CHECKPOINT_PROGRAM "' ", arguments, " 2>&1");
    FILE* pipe = popen(command.c_str(), "r");
    Ended ended;
    char bytes[4096];
    while (const size_t got = std::fread(bytes, 1, sizeof(bytes), pipe))
      ended.printed.append(bytes, got);
    const int status = pclose(pipe);
    ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return ended;
  }
  // A file of one fp32 tensor. Its values are a hole of the file.
  void WriteZeros(const std::string& path, int64_t rows, int64_t columns,
                  const std::string& name) const {
    const int64_t bytes = rows * columns * 4;
    SafetensorsHeader header;
    header.tensors = {
        {.name = name, .dtype = "F32", .shape = {rows, columns}, .begin = 0, .end = bytes}};
    const std::string prefix = SafetensorsPrefix(header, 64);
    std::ofstream(path, std::ios::binary) << prefix;
    fs::resize_file(path, prefix.size() + static_cast<size_t>(bytes));
  }
  void Write(const std::string& path, const std::string& text) const {
    std::ofstream(path, std::ios::binary) << text;
  }
};

TEST_F(CheckpointProgramTest, ConvertsThereAndBackAndSeesOneBit) {
  WriteZeros(Path("a.safetensors"), 30, 40, "model.layers.0.mlp.up_proj.weight");
  ASSERT_THAT(Run("import a.safetensors runs"), Ends(0));
  EXPECT_THAT(Run("inspect runs"), Ends(0, "rank 0: rank-00000-of-00001.safetensors",
                                        "have the checksums that were saved"));
  EXPECT_THAT(Run("export runs out"), Ends(0));
  EXPECT_THAT(Run("diff out a.safetensors"), Ends(0));
  // An existing folder is left unchanged.
  EXPECT_THAT(Run("export runs out"), Ends(2));

  const std::string rank_file = "runs/step-000000000/rank-00000-of-00001.safetensors";
  std::fstream file(Path(rank_file), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-1, std::ios::end);
  file.put('\x01');
  file.close();
  for (const char* command : {"inspect runs", "export runs damaged"}) {
    EXPECT_THAT(Run(command), Ends(1, rank_file));
  }
  EXPECT_FALSE(fs::exists(Path("damaged")));
  EXPECT_TRUE(std::none_of(fs::directory_iterator(folder_), fs::directory_iterator(),
                           [](const fs::directory_entry& entry) {
                             return entry.path().filename().string().starts_with(".writing");
                           }));
}

TEST_F(CheckpointProgramTest, NamesTheReasonOfAnImpossibleRequest) {
  struct Wrong {
    std::string arguments, said;
  };
  fs::create_directory(Path("nothing"));
  fs::create_symlink("/etc/passwd", Path("link.safetensors"));
  fs::create_directory(Path("linked"));
  Write(Path("outside.safetensors"), "");
  fs::create_symlink(Path("outside.safetensors"), Path("linked/model.safetensors"));
  for (const Wrong& wrong : {Wrong{"", "Try ebb-checkpoint --help"},
                             {"inspect", "PATH is required"},
                             {"inspect absent", "absent"},
                             {"inspect nothing", "has no checkpoint of Ebb"},
                             {"inspect link.safetensors", "a link is there"},
                             {"inspect linked", "a link is there"},
                             {"export nothing x --file-size 0", "is not a size"},
                             {"export nothing x --dtype int4", "--dtype"}}) {
    EXPECT_THAT(Run(wrong.arguments), Ends(2, wrong.said)) << wrong.arguments;
  }
}

TEST_F(CheckpointProgramTest, HelpOfEachCommandHasExamples) {
  const Ended help = Run("--help");
  EXPECT_THAT(help, Ends(0, "Exit status"));
  for (const std::string command : {"inspect", "diff", "export", "import"}) {
    EXPECT_THAT(help.printed, HasSubstr(command));
    EXPECT_THAT(Run(command + " --help"), Ends(0, "Examples:\n  ebb-checkpoint " + command,
                                               "a checkpoint, a folder of them"));
  }
}

// Only on a terminal, and wiped at the end.
TEST_F(CheckpointProgramTest, ATerminalShowsHowFarItIs) {
  WriteZeros(Path("a.safetensors"), 30, 40, "w");
  const std::string inspect = "inspect a.safetensors";
  EXPECT_EQ(Run(inspect).printed.find('\r'), std::string::npos);

  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(child, 0);
  if (child == 0) {
    execl(EBB_CHECKPOINT_PROGRAM, "ebb-checkpoint", "inspect", Path("a.safetensors").c_str(),
          nullptr);
    _exit(127);
  }
  std::string shown;
  char bytes[4096];
  // The end of the program shows as an error (EIO) of its terminal.
  for (ssize_t got; (got = read(terminal, bytes, sizeof(bytes))) > 0;)
    shown.append(bytes, static_cast<size_t>(got));
  close(terminal);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << shown;
  EXPECT_THAT(shown, HasSubstr("\rreading [########################################] 100%"));
  EXPECT_THAT(shown, HasSubstr("\r\x1b[Kall values were read"));
}

TEST_F(CheckpointProgramTest, AnIndexNamesFilesBesideItAndNoOthers) {
  const std::string before = R"({"weight_map": {"a": )";
  for (const char* file :
       {"\"../model.safetensors\"", "\"/etc/x.safetensors\"", "\"a/b.safetensors\"",
        "\".safetensors\"", "\"model.bin\"", "7", "\"\"", "\"x\\u0000.safetensors\""}) {
    const auto index = ParseModelIndex(absl::StrCat(before, file, "}}"), "index");
    EXPECT_THAT(index.status(), StatusIs(absl::StatusCode::kDataLoss, "not the plain name"))
        << file;
  }
  for (const char* text : {"", "[]", "{}", R"({"weight_map": 1})", R"({"weight_map": {}})",
                           R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})"})
    EXPECT_EQ(ParseModelIndex(text, "index").status().code(), absl::StatusCode::kDataLoss) << text;
  // The index names a tensor that the file lacks.
  WriteZeros(Path("model-1.safetensors"), 2, 3, "a");
  Write(Path(kSafetensorsIndex),
        R"({"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}})");
  EXPECT_THAT(Run("inspect ."), Ends(1, "has 1 of the 2 tensors"));
}

// A writer that names one file, and then removes the earlier index, like transformers, may have
// been killed between the two.
TEST_F(CheckpointProgramTest, OneFileIsReadBeforeAnIndex) {
  WriteZeros(Path(kSafetensorsFile), 2, 3, "new");
  Write(Path(kSafetensorsIndex), R"({"weight_map": {"old": "model-1.safetensors"}})");
  EXPECT_THAT(Run("inspect ."), Ends(0, "new"));
}

// A script stands for python3 with torch and the package ebb. torch_files_test.py has the real ones.
TEST_F(CheckpointProgramTest, PythonSaysWhereTheTensorsOfTorchLie) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  std::string bytes("PK\3\4", 4);
  bytes.append(reinterpret_cast<const char*>(values.data()), 24);
  Write(Path("m.bin"), bytes);
  const std::string answer = absl::StrCat(
      R"({"kind": "files of torch", "path": "m", "is_model": true, "left_out": [{"name": "long", )"
      R"("why": "no parameter"}], "state": {"applied_steps": 3, "skipped_steps": 2, "scale": 8}, )"
      R"("tensors": [{"name": "w", "state": "", "dtype": "F32", "shape": [5], "file": ")",
      Path("m.bin"), R"(", "at": 8}]})");
  const auto import = [&](const std::string& script) {
    fs::remove_all(Path("runs"));
    Write(Path("python3"), "#!/bin/sh\n" + script + "\n");
    fs::permissions(Path("python3"), fs::perms::owner_all);
    return Run("import m.bin runs", absl::StrCat("PATH='", folder_, "':$PATH "));
  };
  EXPECT_THAT(import("echo a warning >&2\necho '" + answer + "'"),
              Ends(0, "imported 1 tensors of m as", "left out: long, which is no parameter"));
  ASSERT_OK_AND_ASSIGN(const auto imported, OpenTensorSource(Path("runs/step-000000005")));
  EXPECT_EQ(imported->description().state.applied_steps, 3);
  EXPECT_EQ(imported->description().state.loss_scaler.scale, 8);
  std::vector<float> read(5);
  EXPECT_TRUE(imported->Read(0, 0, read).ok());
  EXPECT_EQ(read, std::vector<float>(values.begin() + 1, values.end()));

  const struct {
    std::string script;
    int code;
    const char* said;
  } kWrong[] = {
      {R"(echo '{"error": "m is cut", "code": "DATA_LOSS"}')", 1, "ebb-checkpoint: m is cut\n"},
      {R"(echo '{"error": "m is odd", "code": "INVALID_ARGUMENT"}')", 2, "m is odd"},
      {"echo Traceback:\necho No module named ebb\nexit 1", 2, "python3: No module named ebb\n"},
      {"kill -9 $$", 2, "signal 9 has ended it"},
      {"exit 0", 2, "it has printed nothing"},
      {"echo '{\"kind\": 1}'", 2, "the package ebb is of another version"},
      {"echo '" + answer + "' | sed s/3,/-3,/", 2, "impossible steps"},
      {"echo '" + answer + "' | sed 's/: 8}]/: 9}]/'", 1, "m.bin"}};
  for (const auto& wrong : kWrong) {
    const Ended ended = import(wrong.script);
    EXPECT_THAT(ended, Ends(wrong.code, wrong.said)) << wrong.script;
    EXPECT_EQ(ended.printed.find("Traceback"), std::string::npos);
    EXPECT_FALSE(fs::exists(Path("runs"))) << wrong.script;
  }
  EXPECT_THAT(Run("inspect m.bin", "PATH=/nowhere "),
              Ends(2, "pip install torch", "python3: No such file or directory"));
}

TEST_F(CheckpointProgramTest, OfFilesOfTorchTheLibraryNamesTheProgramThatImportsThem) {
  Write(Path("m.bin"), std::string("PK\3\4", 4));
  Write(Path("old.bin"), "\x80\x02\x8a\x0a\x6c");
  for (const char* name : {"model/pytorch_model.bin", "parts/pytorch_model.bin.index.json",
                           "universal/zero/w", "above/latest_universal"}) {
    fs::create_directories(fs::path(Path(name)).parent_path());
    Write(Path(name), "");
  }
  for (const char* name : {"m.bin", "old.bin", "model", "parts", "universal", "above"}) {
    const absl::Status status = OpenTensorSource(Path(name)).status();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 absl::StrCat("ebb-checkpoint import '", Path(name), "' DIR")));
  }
  Write(Path("model_optim_states.pt"), "");
  EXPECT_THAT(OpenTensorSource(folder_).status(),
              Says("convert it with deepspeed/checkpoint/ds_to_universal.py"));
  // Transformers reads such a folder.
  WriteZeros(Path("model/model.safetensors"), 2, 3, "w");
  EXPECT_TRUE(OpenTensorSource(Path("model")).ok());
}

TEST_F(CheckpointProgramTest, MemoryDoesNotDependOnTheModel) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer takes the address space for itself";
#endif
  // 192 MiB within 160 of address space, transposed on the way in and out.
  WriteZeros(Path("large.safetensors"), 6144, 8192, "h.0.mlp.c_fc.weight");
  const std::string limit = "ulimit -v 163840; ";
  for (const char* command :
       {"import large.safetensors runs", "inspect runs", "export runs out", "diff runs runs"}) {
    EXPECT_THAT(Run(command, limit), Ends(0));
  }
}

// Headers that would take a hundred times their size as a tree of JSON.
TEST_F(CheckpointProgramTest, AHugeHeaderTakesLessThan1GiB) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer takes the address space for itself";
#endif
  constexpr size_t kBytes = 99'000'000;
  const auto filled = [&](std::string text, const auto& more, const std::string& end) {
    for (int64_t i = 0; text.size() + end.size() < kBytes; ++i) text += more(i);
    text += end;
    const uint64_t length = text.size();
    std::string prefix(sizeof(length), '\0');
    std::memcpy(prefix.data(), &length, sizeof(length));
    return prefix + text;
  };
  const auto name = [](int64_t i) { return absl::StrCat("\"", absl::Hex(i), "\":"); };
  const std::string headers[] = {
      filled(R"({"a":{"dtype":"U8","shape":[1)", [](int64_t) { return ",1"; },
             R"(],"data_offsets":[0,1]}})"),
      filled(R"({"__metadata__":{"":"")", [&](int64_t i) { return "," + name(i) + "\"\""; }, "}}"),
      filled(R"({"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})",
             [&](int64_t i) {
               return "," + name(i) + R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
             },
             "}"),
      filled(R"({")", [](int64_t) { return "aaaaaaaa"; }, R"(":1})")};
  for (const std::string& header : headers) {
    Write(Path("huge.safetensors"), header);
    EXPECT_THAT(Run("inspect huge.safetensors", "ulimit -v 1048576; "),
                Ends(1, "huge.safetensors"));
  }
}

TEST_F(CheckpointProgramTest, AnImportMovesNoOtherCheckpointUnasked) {
  WriteZeros(Path("a.safetensors"), 3, 4, "w");
  const std::string import = "import a.safetensors runs";
  ASSERT_THAT(Run(import), Ends(0));
  std::ofstream(Path("runs/step-000000000/note")) << "of the first";
  EXPECT_THAT(Run(import), Ends(2, "'runs' has checkpoints", "--force"));
  EXPECT_TRUE(fs::exists(Path("runs/step-000000000/note")));
  EXPECT_THAT(Run(import + " --force"), Ends(0));
  EXPECT_FALSE(fs::exists(Path("runs/step-000000000/note")));
}

TEST_F(CheckpointProgramTest, AFailedImportLeavesNothing) {
  WriteZeros(Path("a.safetensors"), 300, 400, "w");
  EXPECT_THAT(Run("import a.safetensors runs", "ulimit -f 8; "), Ends(2, "ulimit -f"));
  EXPECT_FALSE(fs::exists(Path("runs")));
}

TEST_F(CheckpointProgramTest, InspectReportsADamagedNewestCheckpointAndNamesTheOlderOne) {
  WriteZeros(Path("a.safetensors"), 3, 4, "w");
  ASSERT_THAT(Run("import a.safetensors runs"), Ends(0));
  const std::string older = Path("runs/step-000000000"), newer = Path("runs/step-000000001");
  const struct {
    const char* what;
    std::function<void(const std::string&)> damage;
    std::string said;
  } kDamages[] = {
      {"data",
       [](const std::string& file) {
         std::fstream in(file, std::ios::binary | std::ios::in | std::ios::out);
         in.seekp(-1, std::ios::end);
         in.put('\x01');
       },
       "rank-00000-of-00001.safetensors' have changed"},
      {"cut", [](const std::string& file) { fs::resize_file(file, fs::file_size(file) - 1); },
       "rank-00000-of-00001.safetensors"},
      {"missing", [](const std::string& file) { fs::remove(file); },
       "rank-00000-of-00001.safetensors"},
      {"no manifest",
       [](const std::string& file) { fs::remove(fs::path(file).parent_path() / "manifest.json"); },
       "manifest.json"}};
  for (const auto& damage : kDamages) {
    SCOPED_TRACE(damage.what);
    fs::remove_all(newer);
    fs::copy(older, newer, fs::copy_options::recursive);
    Write(Path("runs/latest"), "step-000000001\n");
    EXPECT_THAT(Run("inspect runs"), Ends(0));
    damage.damage(newer + "/rank-00000-of-00001.safetensors");
    EXPECT_THAT(Run("inspect runs"),
                Ends(1, damage.said, "name an older checkpoint: 'runs/step-000000000'"));
  }
}

class Numbers : public TensorSource {
 public:
  Numbers() { tensors_ = {{.name = "h.3.attn.c_attn.weight", .shape = {5, 7}}}; }
  absl::Status Read(size_t, int64_t begin, std::span<float> values) override {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(begin + static_cast<int64_t>(i));
    return absl::OkStatus();
  }
};

TEST(ParameterNamesTest, AnyIntervalOfATransposedMatrixIsRight) {
  ASSERT_OK_AND_ASSIGN(const auto source,
                       NamedInside(std::make_unique<Numbers>(), ParameterNames::kAuto));
  ASSERT_EQ(source->tensors().size(), 1u);
  EXPECT_EQ(source->tensors()[0].name, "block3.qkv.weight");
  EXPECT_EQ(source->tensors()[0].shape, (std::vector<int64_t>{7, 5}));
  for (int64_t begin = 0; begin < 35; ++begin) {
    for (int64_t end = begin + 1; end <= 35; ++end) {
      std::vector<float> values(static_cast<size_t>(end - begin));
      ASSERT_TRUE(source->Read(0, begin, values).ok());
      for (int64_t at = begin; at < end; ++at)
        ASSERT_EQ(values[static_cast<size_t>(at - begin)], static_cast<float>(at % 5 * 7 + at / 5))
            << begin << " " << end;
    }
  }
  std::vector<float> beyond(2);
  EXPECT_FALSE(source->Read(0, 34, beyond).ok());
}

TEST(ParameterNamesTest, NamesOfGpt2GoThereAndBack) {
  for (const char* outside : {"transformer.wte.weight", "transformer.h.0.ln_1.bias",
                              "transformer.h.11.mlp.c_proj.weight"}) {
    const auto own = Gpt2NameInside(outside);
    ASSERT_TRUE(own.has_value()) << outside;
    const auto back = Gpt2NameOutside(own->name);
    ASSERT_TRUE(back.has_value()) << own->name;
    EXPECT_EQ(back->name, outside);
    EXPECT_EQ(back->transposed, own->transposed);
  }
  for (const char* none : {"", "h.x.ln_1.bias", "h..ln_1.bias", "h.01.ln_1.bias", "h.0.ln_1",
                           "lm_head.weight", "h.#.ln_1.bias"})
    EXPECT_FALSE(Gpt2NameInside(none).has_value()) << none;
}

}  // namespace
}  // namespace ebb::testing::checkpoint_program_test
