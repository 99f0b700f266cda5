"""What a run writes into its folder, and reads back."""
