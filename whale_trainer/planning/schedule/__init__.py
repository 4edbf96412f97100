"""What each rank runs, in which order: actions, schedules, lowering to instructions, the replay that shows locks."""
