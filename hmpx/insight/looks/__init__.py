"""What is looked for in a run, by `hmpx.insight.dispatch.Look`s."""
