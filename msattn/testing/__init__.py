"""What tests, benchmarks, examples and users' acceptance tests share: truth, inputs, comparison."""
