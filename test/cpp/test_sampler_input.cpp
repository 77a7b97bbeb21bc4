// Invalid sampler input: the error names row, value and limit, and nothing changes.
#include "sampler_rows.hpp"

using namespace sampler_test;

namespace {

template <typename Change> void refused(std::initializer_list<const char *> parts, Change change) {
    Sampler sampler(stream(), 10);
    const std::vector<float> logits(20, 1.0f);
    Row row;
    row.bias = {{1, 1.0f}};
    row.n_logprobs = 1;
    row.mask = 0;
    Columns columns({row, row}, {~0u});
    LlaisysSamplingMetadata s = columns.view(10);
    int32_t ids[2] = {-7, -7};
    sampler.sample(logits.data(), 2, s, ids);
    const int32_t before = ids[1];
    change(columns, s);
    check::throws(__FILE__, __LINE__, "sample", parts,
                  [&] { sampler.sample(logits.data(), 2, s, ids); });
    CHECK_EQ(ids[1], before);
    CHECK_EQ(sampler.logprobs(1).n, 2); // of the previous call
}

} // namespace

TEST(errors_name_row_value_and_limit) {
    using C = Columns;
    using S = LlaisysSamplingMetadata;
    refused({"n_rows", "got -1"}, [](C &, S &s) { s.n_rows = -1; });
    refused({"n_numbers", "got -1"}, [](C &, S &s) { s.n_numbers = -1; });
    refused({"numbers is NULL"}, [](C &, S &s) { s.numbers = nullptr; });
    refused({"numbers[1].name is NULL"}, [](C &c, S &) { c.entries[1].name = nullptr; });
    refused({"numbers[1].name", "one of temperature, ", "got heat"},
            [](C &c, S &) { c.entries[1].name = "heat"; });
    refused({"numbers[1].name repeats temperature"},
            [](C &c, S &) { c.entries[1].name = "temperature"; });
    refused({"numbers[1].values", "top_p", "NULL"},
            [](C &c, S &) { c.entries[1].values = nullptr; });
    refused({"rows[1]", "[0, 2)", "got 2"}, [](C &c, S &) { c.outputs[1] = 2; });
    refused({"rows[0]", "got -1"}, [](C &c, S &) { c.outputs[0] = -1; });
    refused({"n_rows", "2", "got 3"}, [](C &, S &s) {
        s.rows = nullptr;
        s.n_rows = 3;
    });
    refused({"seq_ids[1]", "got -5"}, [](C &c, S &) { c.seqs[1] = -5; });
    refused({"temperature[1]", "got -0.5"}, [](C &c, S &) { c.numbers["temperature"][1] = -0.5f; });
    refused({"temperature[0]", "got nan"}, [](C &c, S &) { c.numbers["temperature"][0] = kNaN; });
    refused({"temperature[0]", "got inf"}, [](C &c, S &) { c.numbers["temperature"][0] = kInf; });
    refused({"top_p[1]", "(0, 1]", "got 0"}, [](C &c, S &) { c.numbers["top_p"][1] = 0; });
    refused({"top_p[1]", "got 1.5"}, [](C &c, S &) { c.numbers["top_p"][1] = 1.5f; });
    refused({"top_p[1]", "got nan"}, [](C &c, S &) { c.numbers["top_p"][1] = kNaN; });
    refused({"min_p[0]", "[0, 1]", "got 2"}, [](C &c, S &) { c.numbers["min_p"][0] = 2; });
    refused({"min_p[0]", "got nan"}, [](C &c, S &) { c.numbers["min_p"][0] = kNaN; });
    refused({"typical_p[1]", "(0, 1]", "got 0"}, [](C &c, S &) { c.numbers["typical_p"][1] = 0; });
    refused({"typical_p[0]", "got nan"}, [](C &c, S &) { c.numbers["typical_p"][0] = kNaN; });
    refused({"top_n_sigma[1]", "at least 0", "got -1"},
            [](C &c, S &) { c.numbers["top_n_sigma"][1] = -1; });
    refused({"xtc_probability[1]", "[0, 1]", "got 1.5"},
            [](C &c, S &) { c.numbers["xtc_probability"][1] = 1.5f; });
    refused({"xtc_threshold[0]", "[0, 1]", "got -1"},
            [](C &c, S &) { c.numbers["xtc_threshold"][0] = -1; });
    refused({"repetition_penalty[0]", "got 0"},
            [](C &c, S &) { c.numbers["repetition_penalty"][0] = 0; });
    refused({"presence_penalty[1]", "got -inf"},
            [](C &c, S &) { c.numbers["presence_penalty"][1] = -kInf; });
    refused({"frequency_penalty[1]", "got nan"},
            [](C &c, S &) { c.numbers["frequency_penalty"][1] = kNaN; });
    refused({"top_p[0]", "got 1e-60"}, [](C &c, S &) { c.numbers["top_p"][0] = 1e-60; });
    refused({"presence_penalty[1]", "got 1e+39"},
            [](C &c, S &) { c.numbers["presence_penalty"][1] = 1e39; });
    refused({"top_k[1]", "got -1"}, [](C &c, S &) { c.numbers["top_k"][1] = -1; });
    refused({"top_k[0]", "integer", "got 1.5"}, [](C &c, S &) { c.numbers["top_k"][0] = 1.5; });
    refused({"top_k[0]", "got 1e+10"}, [](C &c, S &) { c.numbers["top_k"][0] = 1e10; });
    refused({"top_k[0]", "got nan"}, [](C &c, S &) { c.numbers["top_k"][0] = kNaN; });
    refused({"positions[1]", "got -1"}, [](C &c, S &) { c.positions[1] = -1; });
    refused({"choices[1]", "got -1"}, [](C &c, S &) { c.choices[1] = -1; });
    refused({"n_logprobs[1]", "10", "got 11"}, [](C &c, S &) { c.numbers["n_logprobs"][1] = 11; });
    refused({"n_logprobs[1]", "got -2"}, [](C &c, S &) { c.numbers["n_logprobs"][1] = -2; });
    refused({"chain_offsets[0]", "got 1"}, [](C &c, S &) { c.chain_offsets[0] = 1; });
    refused({"chain_offsets[2]", "8", "got 4"}, [](C &c, S &) { c.chain_offsets[2] = 4; });
    refused({"chain of row 1", "9", "got 2000000000"},
            [](C &c, S &) { c.chain_offsets[2] = 2000000008; });
    refused({"chain is NULL"}, [](C &, S &s) { s.chain = nullptr; });
    refused({"chain[9]", "row 1", "[0, 9)", "got 9"}, [](C &c, S &) { c.chain[9] = 9; });
    refused({"chain[1]", "row 0", "repeats kind 0"}, [](C &c, S &) { c.chain[1] = 0; });
    refused({"bias_offsets[0]", "got -1"}, [](C &c, S &) { c.bias_offsets[0] = -1; });
    refused({"bias_offsets[2]", "got 0"}, [](C &c, S &) { c.bias_offsets[2] = 0; });
    refused({"bias_ids is NULL"}, [](C &, S &s) { s.bias_ids = nullptr; });
    refused({"bias_values is NULL"}, [](C &, S &s) { s.bias_values = nullptr; });
    refused({"bias_ids[1]", "row 1", "[0, 10)", "got 10"}, [](C &c, S &) { c.bias_ids[1] = 10; });
    refused({"bias_values[0]", "row 0", "got inf"}, [](C &c, S &) { c.bias_values[0] = kInf; });
    refused({"bias_values[1]", "got nan"}, [](C &c, S &) { c.bias_values[1] = kNaN; });
    refused({"n_masks", "got -1"}, [](C &, S &s) { s.n_masks = -1; });
    refused({"mask_rows[1]", "[-1, 1)", "got 1"}, [](C &c, S &) { c.mask_rows[1] = 1; });
    refused({"mask_rows[0]", "got -2"}, [](C &c, S &) { c.mask_rows[0] = -2; });
    refused({"masks is NULL", "mask_rows[0]"}, [](C &, S &s) { s.masks = nullptr; });
}

TEST(invalid_arguments_are_rejected) {
    CHECK_THROWS(Sampler(stream(), 0), "vocabulary", "got 0");
    Sampler sampler(stream(), 4);
    LlaisysSamplingMetadata s = {};
    s.n_rows = 1;
    int32_t id = 0;
    const float logits[4] = {};
    CHECK_THROWS(sampler.sample(nullptr, 1, s, &id), "logits is NULL");
    CHECK_THROWS(sampler.sample(logits, 1, s, nullptr), "ids is NULL");
    const int64_t good[] = {1, 2}, bad[] = {1, 4};
    CHECK_THROWS(sampler.reset(-1, good, 2), "seq_id", "got -1");
    CHECK_THROWS(sampler.reset(0, bad, 2), "prompt[1]", "[0, 4)", "got 4");
    CHECK_THROWS(sampler.reset(0, nullptr, 2), "prompt is NULL");
    CHECK_THROWS(sampler.accept(0, good, -1), "got -1");
    CHECK_THROWS(sampler.accept(0, bad, 2), "tokens[1]", "got 4");
    CHECK_THROWS(sampler.forget(-1), "seq_id");
    // The rejected accept changed nothing: token 1 was not counted.
    const float row[] = {0, 3, 1, 0};
    const double zero = 0, heavy = 9;
    const LlaisysSamplingNumber numbers[] = {{"temperature", &zero}, {"presence_penalty", &heavy}};
    const int64_t seq = 0;
    s.seq_ids = &seq;
    s.numbers = numbers;
    s.n_numbers = 2;
    sampler.sample(row, 1, s, &id);
    CHECK_EQ(id, 1);
}
