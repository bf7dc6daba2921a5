"""What a change did to the answers: two engines score the same tokens, and statistics judge the differences."""
